"""The attack protocol: each attack in turn on the examples that are still answered right. Finished
batches are saved under names made of all they depend on (see `identity`), so that a killed run
resumes after them and ends with the same result."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.attacks.base import blindness
from otad.attacks.target import Target, seeded
from otad.errors import InputError
from otad.evaluate.identity import Identity, generator_for
from otad.evaluate.records import AttackRecord, Findings
from otad.io.codec import digest_of, from_plain, to_plain
from otad.io.tensor_files import fingerprint, read_tensors, write_tensors
from otad.model.captured import uncaptured
from otad.progress import AttackReport
from otad.workers import Workers, working

VERSION = 1  # raise it when the same attack on the same batch would be reported differently
HALVINGS = 8  # of the way back to the example: distances are exact to 1/256

PreparedAttack = tuple[Attack, str, dict[str, Any], Path | None]  # version, settings, saved where


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
def run_attacks(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: LpBall,
    attacks: Sequence[Attack],
    *,
    eps: Sequence[float] | None = None,
    survivors_only: bool = True,
    strongest: bool = False,
    certified: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    batch_size: int = 250,
    folder: Path | None = None,
    executor: Executor | Workers | int | None = None,
    progress: AttackReport | None = None,
) -> Attacked:
    """Run attacks on examples x (n,*) with right answers y (n,), on the model's device.

    - `eps`: the radii, ascending; that of the threat by default. `survivors_only`: see `evaluate`.
    - `strongest`: find the input with the largest margin of a wrong class of every row (in
      regression, always, the largest error); otherwise the nearest one of each broken row.
    - `certified`: attacks by name that leave out rows with a certified radius (n,) above eps.
    - `folder`: where finished batches are saved, and found again.
    - `executor`: who attacks the batches of an attack at one eps; see `evaluate`."""
    found = Attacked(model, x, y, threat, strongest, seed, batch_size, folder)
    described = [found.described(attack) for attack in attacks]
    balls = [threat.with_eps(radius) for radius in ((threat.eps,) if eps is None else eps)]
    runs = list(itertools.product(balls, described))
    steps = math.ceil(len(x) / batch_size)
    with working(executor) as workers:
        for number, (ball, run) in enumerate(runs):
            attack, radius, chosen = run[0], ball.eps, found.right
            if survivors_only and not found.is_value:
                chosen = chosen & (found.distances > radius)
            if certified is not None and attack.name in certified:
                chosen = chosen & (certified[attack.name].cpu() <= radius)
            batches = found.batches(run, ball, chosen.nonzero()[:, 0], workers)
            for done in itertools.chain(batches, (steps,)):
                if progress is not None:
                    label, worst = f"{attack.name}, eps {radius:g}", found.worst(radius)
                    progress(label, number * steps + done, len(runs) * steps, worst)
    return found


class Attacked:
    """What attacks have found on n examples; tensors are on the CPU.

    `right` (n,): answered right without attack (regression: all). `abstained`: how many get no
    answer. `distances` (n,): see `Evaluation.distances`. `gains` (n,): the largest margin of a
    wrong class, or |f - y|, within the eps of the threat. `inputs` (n,*): the nearest (or
    strongest) input of the rows that are `found` (n,). `remarks`: those of attacks, by name."""

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: LpBall, strongest: bool = False,
        seed: int = 0, batch_size: int = 250, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.model, self.x, self.y, self.threat = model, x, y, threat
        self.seed, self.batch_size = seed, batch_size
        self.is_value = y.is_floating_point()
        self.strongest = strongest or self.is_value
        unattacked, generator = Unattacked(), generator_for(seed, "clean")
        parts = zip(x.split(batch_size), y.split(batch_size), strict=True)
        results = [unattacked(model, *part, threat, generator=generator) for part in parts]
        broken = torch.cat([one.broken for one in results]).cpu()
        self.right = torch.ones_like(broken) if self.is_value else ~broken
        self.abstained = sum(int(one.abstained.sum()) for one in results)
        self.gains = torch.cat([one.gain for one in results]).double().cpu()
        self.clean_errors = tuple(self.gains.tolist()) if self.is_value else ()
        self.distances = torch.zeros(len(x), dtype=torch.float64)
        self.distances[self.right] = math.inf
        self._context = BatchContext(model, x, y, seed, self.strongest)
        self.inputs, self.found = x.cpu().clone(), torch.zeros(len(x), dtype=torch.bool)
        self.records: list[AttackRecord] = []
        self.remarks: dict[str, dict[str, None]] = {}  # a set that is ordered
        self.saved_seconds = 0.0  # spent on batches that an earlier run had finished
        identity = Identity()
        self.card = identity.model(model)
        self._folder = None if folder is None else folder / "parts"
        self._unknown = identity.unknown
        self.data = fingerprint({"x": x, "y": y})
        self._common = {
            "protocol": VERSION, "device": x.device.type, "model": self.card["fingerprint"],
            "data": self.data, "seed": seed, "strongest": self.strongest,
        }  # fmt: skip

    def worst(self, eps: float) -> float:
        return float((self.gains if self.is_value else (self.distances > eps).double()).mean())

    def described(self, attack: Attack) -> PreparedAttack:
        """Return the version and settings of an attack, before it runs and may note something about
        itself, and where its batches are saved: nowhere if they could be confused with those of
        another model or attack."""
        identity = Identity()
        version, settings = identity.version(attack, attack.name), identity.attack(attack)
        unknown = [*self._unknown, *identity.unknown]
        if self._folder is not None and unknown:
            why = f"without a plain description: {', '.join(unknown)}"
            warnings.warn(f"finished batches are not saved, because of values {why}", stacklevel=4)
        return attack, version, settings, None if unknown else self._folder

    def batches(
        self, described: PreparedAttack, ball: LpBall, rows: Tensor, workers: Workers
    ) -> Iterator[int]:
        """One attack in one ball: yields, at first and after each batch, how many are done."""
        attack, version, settings, folder = described
        eps, parts = ball.eps, dict[int, Part]()
        identity = [attack.name, version, settings]
        key = self._common | {"attack": identity, "threat": ball.to_dict()}
        batches = rows.split(self.batch_size) if len(rows) else ()
        paths: dict[int, Path | None] = {}  # of the batches that are not there
        yield 0
        for number, some in enumerate(batches):
            name = digest_of(key | {"batch": number, "rows": some.tolist()})
            path = None if folder is None else folder / f"{name}.safetensors"
            part = None if path is None else Part.read(path)
            if part is None:
                paths[number] = path
                continue
            self.saved_seconds += part.findings.seconds
            parts[number] = part
            self._learn(part, eps)
            yield len(parts)
        tasks = ((ball, batches[number], number) for number in paths)
        missing = tuple(paths)
        for place, part in workers.run(attack_batch, (self._context, attack), tasks):
            number = missing[place]
            if (path := paths[number]) is not None:
                part.write(path)
            parts[number] = part
            self._learn(part, eps)
            yield len(parts)
        about: dict[str, Any] = {field.name: field.default for field in fields(Findings)}
        found = [parts[number] for number in sorted(parts)]
        for part, name in itertools.product(found, tuple(about)):
            about[name] += getattr(part.findings, name)
        about |= {"attack": attack.name, "family": attack.family, "eps": eps, "settings": settings}
        self.records.append(AttackRecord(**about))
        for remark in itertools.chain(*(part.remarks for part in found)):
            self.remarks.setdefault(attack.name, {})[remark] = None

    def _learn(self, part: Part, eps: float) -> None:
        rows = torch.tensor(part.findings.broken, dtype=torch.int64)
        distances = torch.tensor(part.findings.distances, dtype=torch.float64)
        better = distances < self.distances[rows]
        self.distances[rows[better]] = distances[better]
        if self.strongest:
            rows = torch.tensor(part.findings.attacked, dtype=torch.int64)
            better = (part.gains > self.gains[rows]) & (eps <= self.threat.eps)
            self.gains[rows[better]] = part.gains[better]
        self.inputs[rows[better]] = part.inputs[better]
        self.found[rows[better]] = True


@dataclass(frozen=True, eq=False)
class BatchContext:
    """What every batch needs: see `Attacked`."""

    model: nn.Module
    x: Tensor
    y: Tensor
    seed: int
    strongest: bool


@torch.inference_mode(False)
def attack_batch(
    context: BatchContext, attack: Attack, ball: LpBall, rows: Tensor, number: int
) -> Part:
    """Attack some rows (m,) of the examples, in any process: its randomness depends on the seed,
    the attack, the eps and the number of the batch."""
    started = time.perf_counter()
    model, is_value = context.model, context.y.is_floating_point()
    generator = generator_for(context.seed, attack.name, repr(ball.eps), number)
    x, y = (part[rows.to(part.device)] for part in (context.x, context.y))
    result = attack(model, x, y, ball, generator=generator)
    broken = torch.zeros_like(result.broken) if is_value else result.broken
    inputs, abstained = result.inputs.clone(), result.abstained.clone()
    distance, forwards = result.distance.clone(), int(result.forwards.sum())
    if not context.strongest and bool(broken.any()):
        target = Target(model, y[broken])
        with seeded(model, generator), uncaptured():  # the model itself is the judge
            nearest = shorten(target, x[broken], inputs[broken], ball)
        inputs[broken], abstained[broken] = nearest
        distance[broken] = ball.distance(inputs[broken], x[broken])
        forwards += int(target.forwards.sum())
    gains = result.gain.double().cpu()
    findings = Findings(
        attacked=tuple(rows.tolist()),
        broken=tuple(rows[broken.cpu()].tolist()),
        distances=tuple(distance[broken].tolist()),
        abstained=tuple(rows[(broken & abstained).cpu()].tolist()),
        errors=tuple(gains.tolist()) if is_value else (),
        forwards=forwards,
        backwards=int(result.backwards.sum()),
        seconds=time.perf_counter() - started,
    )
    remarks = tuple(str(remark) for remark in getattr(attack, "remarks", ()))
    if bool(result.blind.any()):
        remarks += (blindness(result.blind),)
    shown = torch.ones_like(broken) if context.strongest else broken
    return Part(findings, remarks, gains[shown.cpu()], inputs[shown].cpu())


class Unattacked(Attack):
    """Leaves every example as it is, for the checks and the verdict of an attack."""

    name = "unattacked"
    family = "random"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        return x


@dataclass(frozen=True, eq=False)
class Part:
    """One finished batch: `gains` (m,) and `inputs` (m,*) of its broken rows, or of all."""

    findings: Findings
    remarks: tuple[str, ...]
    gains: Tensor
    inputs: Tensor

    def write(self, path: Path) -> None:
        header = {"findings": to_plain(self.findings), "remarks": list(self.remarks)}
        write_tensors(path, {"gains": self.gains, "inputs": self.inputs}, header)

    @staticmethod
    def read(path: Path) -> Part | None:
        """None where there is no such file, or a damaged one."""
        try:
            tensors, header = read_tensors(path)
            findings = from_plain(Findings, header["findings"], path.name)
            return Part(findings, tuple(header["remarks"]), tensors["gains"], tensors["inputs"])
        except (InputError, KeyError):
            return None


@torch.no_grad()
def shorten(target: Target, x: Tensor, found: Tensor, ball: LpBall) -> tuple[Tensor, Tensor]:
    """The nearest wrong input met by bisection between x (B,*) and `found` (B,*), which is wrong;
    and whether the model abstains there (B,)."""
    best, length = found.clone(), ball.distance(found, x)
    silent = target(found).isnan().any(1)
    low = x.new_zeros(len(x), *[1] * (x.dim() - 1))
    high = torch.ones_like(low)
    for _ in range(HALVINGS):
        share = (low + high) / 2
        moved = ball.project(x + share * (found - x), x)
        answers = target(moved)
        wrong, distance = target.is_broken(answers), ball.distance(moved, x)
        shorter = wrong & (distance < length)
        best[shorter], length[shorter] = moved[shorter], distance[shorter]
        silent[shorter] = answers[shorter].isnan().any(1)
        is_high = wrong.view_as(high)
        high, low = torch.where(is_high, share, high), torch.where(is_high, low, share)
    return best, silent
