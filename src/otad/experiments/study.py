"""An experiment in progress: its data, what it learns and what it measures, each made once.

Everything finished is saved in the work folder (see `cache`), so that a killed run resumes and
experiments share what they have in common, also those of several processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from otad.attacks import ATTACKS
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip.surrogate import CipNet
from otad.cip.whole_bank.potential import BankPotential
from otad.data import Dataset, load, most_central, subset_per_class
from otad.evaluate.protocol import VERSION as PROTOCOL_VERSION
from otad.experiments.cache import Report, WorkFolder
from otad.experiments.experiment import Experiment
from otad.experiments.learn import Learned, Learner, N, Source
from otad.experiments.records import (
    AttackedScore,
    Candidate,
    CostRecord,
    PotentialRecord,
    Regularity,
    RowRecord,
)
from otad.experiments.rows import VERSION, attack_row, measure_regularity, measure_row
from otad.experiments.spec import Choice, RowSpec, name_of
from otad.io.codec import digest_of
from otad.io.tensor_files import read_tensors, write_tensors
from otad.model.answerer_options import solver_for
from otad.model.answerers import WholeBankAnswerer
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.model.prototypes import PrototypeNet
from otad.nets import Backbone, Metric, only_normalizes
from otad.progress import PartReport

Part = TypeVar("Part", RowRecord, AttackedScore, Regularity, CostRecord)
KNN = {"mean_feature_knn": MeanFeatureKnn, "majority_knn": MajorityKnn}
MODEL = "method n_neighbors scope smoothness strong_convexity mode climb per_class central"
"""The settings of a row that decide its answers, beside its net, metric and CIP-net."""
KEY_ROWS = 1024
T = TypeVar("T")


def once(method: Callable[[Any, str], T]) -> Callable[[Any, str], T]:
    """A method of `Study` whose result for each key is remembered."""

    @wraps(method)
    def remembering(study: Study, key: str) -> T:
        name = (method.__name__, key)
        if name not in study.made:
            study.made[name] = method(study, key)
        found: T = study.made[name]
        return found

    return remembering


@dataclass(eq=False)
class Study:
    """Loads, trains and measures what the rows of an experiment ask for, on first use."""

    experiment: Experiment
    report: PartReport
    work: WorkFolder
    data_dir: str | Path | None = None
    device: str = "cpu"
    seed: int = 0
    made: dict[tuple[str, str], Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    candidates: dict[str, tuple[Candidate, ...]] = field(default_factory=dict)
    _bank: tuple[str, OTAD] | None = None

    @once
    def source(self, key: str) -> Source:
        """A data set."""
        self.report(f"load {key}", 0, 1)
        spec = self.experiment.data[key]
        data = load(spec.name, self.data_dir, seed=self.seed, **spec.options)
        self.experiment.check_data(key, data)
        self.report(f"load {key}", 1, 1)
        return Source(data, data.fingerprint())

    def data(self, row: RowSpec) -> Dataset:
        """The data set of a row."""
        return self.source(self.experiment.nets[row.net].data).data

    @once
    def net(self, key: str) -> Learned[Backbone]:
        """A net, trained with the setting that its table `choose` chooses, if there is one."""
        spec = self.experiment.nets[key]
        settings, source = spec.settings, self.source(spec.data)
        if spec.choose is not None:
            found = tuple(self._try(key, spec.choose, value) for value in spec.choose.values)
            best = max(found, key=lambda candidate: candidate.score.rank)
            self.candidates[key] = found
            settings = settings | {spec.choose.setting: best.value}
        return self._learn(f"train {key}", lambda learner: learner.net(spec, source, settings))

    def _try(self, key: str, choice: Choice, value: float) -> Candidate:
        """The score of a value, from an experiment of its own on the train part."""
        spec, label = self.experiment.nets[key], f"{key} with {choice.setting} = {value:g}"
        train = spec.train | {choice.setting: value}
        train |= {} if choice.epochs is None else {"epochs": choice.epochs}
        row = replace(self.experiment.rows[choice.row], lipschitz=None, attacks={})
        nets = {key: replace(spec, train=train, choose=None)}
        none: dict[str, Any] = {"metrics": {}, "surrogates": {}}
        none |= dict.fromkeys(("cost", "speed", "evaluate"))
        trial = replace(self.experiment, nets=nets, rows={choice.row: row}, **none)

        def report(name: str, done: int, total: int) -> None:
            self.report(f"{label}: {name}", done, total)

        study = Study(trial, report, self.work, self.data_dir, self.device, self.seed)
        part = self.source(spec.data).validation_part(choice.validation, self.seed)
        study.made["source", spec.data] = part
        record = study.row(choice.row)
        self.seconds |= {f"{label}: {name}": took for name, took in study.seconds.items()}
        if choice.certified is None:
            return Candidate(value, record.score)
        return Candidate(value, record.certified[name_of(choice.certified)])

    @once
    def metric(self, key: str) -> Learned[Metric]:
        spec = self.experiment.metrics[key]
        source = self.source(spec.data)
        return self._learn(f"train metric {key}", lambda learner: learner.metric(spec, source))

    @once
    def surrogate(self, key: str) -> Learned[CipNet]:
        spec = self.experiment.surrogates[key]
        model, identity = self.defended(spec.row), self.identity(spec.row)
        return self._learn(
            f"train surrogate {key}", lambda learner: learner.surrogate(spec, model, identity)
        )

    def _learn(self, label: str, learn: Callable[[Learner], Learned[N]]) -> Learned[N]:
        found = learn(Learner(self.work, self.device, self.seed, partial(self.report, label)))
        self.seconds[label] = found.record.seconds
        return found

    @contextmanager
    def timed(self, label: str) -> Iterator[Report]:
        """Record the seconds of a block, whose progress is reported under a label."""
        started = time.perf_counter()
        yield partial(self.report, label)
        self.seconds[label] = time.perf_counter() - started

    def bank(self, net: str) -> OTAD:
        """OTAD over the whole bank of a net. Only the last one is held: banks are large."""
        if self._bank is None or self._bank[0] != net:
            self._bank = None
            spec, backbone = self.experiment.nets[net], self.net(net).net
            data, dtype = self.source(spec.data).data, getattr(torch, spec.bank)
            with self.timed(f"bank of {net}") as report:
                if isinstance(backbone, PrototypeNet):
                    model = OTAD(backbone, backbone.bank(), n_neighbors=1).eval()
                else:
                    pairs = data.train_x, data.train_y
                    model = defend(
                        backbone, *pairs, n_neighbors=1, bank_dtype=dtype, progress=report
                    )
            self._bank = net, model
        return self._bank[1]

    @once
    def keys(self, metric: str) -> Tensor:
        """The keys (N,m) of the whole train part."""
        net = self.metric(metric).net
        batches = self.source(self.experiment.metrics[metric].data).data.train_x.split(KEY_ROWS)
        found: list[Tensor] = []
        with self.timed(f"keys by {metric}") as report, torch.no_grad():
            for batch in batches:
                found.append(net(batch.to(net.mean.device)))
                report(len(found), len(batches))
        return torch.cat(found)

    def bank_rows(self, row: RowSpec) -> Tensor | None:
        """The points of the train part that are in the bank of a row, None for all."""
        labels = self.data(row).train_y
        if row.per_class is None:
            return None
        if row.central and row.metric is not None:
            keys = self.keys(row.metric)
            return most_central(keys, labels.to(keys.device), row.per_class).cpu()
        generator = torch.Generator().manual_seed(self.seed)
        return subset_per_class(labels.cpu(), row.per_class, generator)

    def base(self, row: RowSpec) -> OTAD:
        """OTAD over the bank of a row, with its metric and otherwise default settings."""
        base, rows, changes = self.bank(row.net), self.bank_rows(row), dict[str, Any]()
        if row.metric is not None:
            changes = {"metric": self.metric(row.metric).net, "keys": self.keys(row.metric)}
        if rows is not None:
            rows = rows.to(base.bank.labels.device)
            changes["bank"] = base.bank.select(rows)
            if row.metric is not None:
                changes["keys"] = changes["keys"][rows.to(changes["keys"].device)]
        return base.replace(**changes) if changes else base

    def model(self, key: str) -> nn.Module:
        """What answers in a row: the defense, the net alone or a k-NN over the same bank."""
        row = self.experiment.rows[key]
        if row.method == "net":
            return self.net(row.net).net
        if row.method in KNN:
            return KNN[row.method](self.base(row), row.n_neighbors).eval()
        return self.defended(key)

    def defended(self, key: str) -> OTAD:
        """The model of a row of OTAD."""
        row = self.experiment.rows[key]
        found = self.potential(key)
        surrogate = None if row.surrogate is None else self.surrogate(row.surrogate).net
        return self.base(row).replace(
            scope=row.scope,
            n_neighbors=row.n_neighbors,
            smoothness=row.smoothness,
            strong_convexity=row.strong_convexity,
            potential=None if found is None else found[0],
            solver=surrogate or solver_for(row.scope, mode=row.mode, climb=row.climb),
        )

    def potential(self, key: str) -> tuple[BankPotential, PotentialRecord] | None:
        """The potential of a row's global map; None for other rows."""
        row = self.experiment.rows[key]
        if row.method != "otad" or row.uses_neighbors:
            return None
        name, label = digest_of({"potential": self.identity(key)}), f"potential of {row.net}"
        path = self.work.folder / "potentials" / f"{name}.safetensors"
        with self.work.lock(name):
            if not path.exists():
                curvature = {"smoothness": row.smoothness, "strong_convexity": row.strong_convexity}
                with self.timed(label):
                    model = self.base(row).replace(scope=row.scope, **curvature)
                block = model.answerer.block()
                assert block is not None
                header = {"entry": block.entry, "seconds": self.seconds[label]}
                write_tensors(path, block.tensors, header)
            tensors, about = read_tensors(path)
        self.report(label, 1, 1)
        found = WholeBankAnswerer.restore({}, about["entry"], tensors)["potential"]
        scalars = found.smoothness, found.strong_convexity, tuple(found.left_out.tolist())
        record = PotentialRecord(*scalars, found.sweeps, found.violation, about["seconds"])
        return found, record

    def train_inputs(self, row: RowSpec) -> Tensor | None:
        """The training inputs of a row's bank, where the bank itself does not show them."""
        if only_normalizes(self.net(row.net).net):
            return None
        rows, x = self.bank_rows(row), self.data(row).train_x
        return x if rows is None else x[rows]

    def identity(self, key: str) -> dict[str, Any]:
        """All that decides the answers of a row's model on its device."""
        row = self.experiment.rows[key]
        net = self.experiment.nets[row.net]
        return {
            "net": self.net(row.net).identity,
            "data": self.source(net.data).fingerprint,
            "bank": net.bank,
            "model": {name: getattr(row, name) for name in MODEL.split()},
            "metric": row.metric and self.metric(row.metric).identity,
            "surrogate": row.surrogate and self.surrogate(row.surrogate).identity,
            "device": self.device,
            "seed": self.seed,
        }

    def row(self, key: str) -> RowRecord:
        """A row of the table, without attacks."""
        row = self.experiment.rows[key]

        def measure(report: Report) -> RowRecord:
            model, data, found = self.model(key), self.data(row), self.potential(key)
            potential = None if found is None else found[1]
            net, seed = self.net(row.net).net, self.seed
            return measure_row(row, model, net, data, potential, seed=seed, report=report)

        return self.part(key, RowRecord, [self.identity(key), row.certify, row.lipschitz], measure)

    def attack(self, key: str, name: str) -> AttackedScore:
        """A row under attack."""
        row = self.experiment.rows[key]
        spec = replace(row.attacks[name], label="")

        def measure(report: Report) -> AttackedScore:
            model, net, inputs = self.model(key), self.net(row.net).net, self.train_inputs(row)
            data, seed = self.data(row), self.seed
            return attack_row(spec, model, net, data, inputs, seed=seed, report=report)

        versions = [ATTACKS[run].version for run in spec.runs if run in ATTACKS]
        identity = [self.identity(key), spec, PROTOCOL_VERSION, versions]
        return self.part(f"{key}: {name}", AttackedScore, identity, measure)

    def regularity(self, net: str) -> Regularity | None:
        """Of a net that OTAD defends by neighbors, with those of the first such row."""
        for key, row in self.experiment.rows.items():
            if (row.net, row.method, row.uses_neighbors) == (net, "otad", True):
                return self.part(
                    f"regularity of {net}",
                    Regularity,
                    self.identity(key),
                    partial(self._regularity, key),
                )
        return None

    def _regularity(self, key: str, report: Report) -> Regularity:
        data = self.data(self.experiment.rows[key])
        return measure_regularity(self.defended(key), data, seed=self.seed, report=report)

    def part(
        self, label: str, kind: type[Part], identity: Any, measure: Callable[[Report], Part]
    ) -> Part:
        """What `measure` finds, or found in an earlier run; its seconds are recorded."""
        name = [kind.__name__, VERSION, identity]
        found = self.work.part(kind, name, lambda: measure(partial(self.report, label)))
        self.report(label, 1, 1)
        self.seconds[label] = found.seconds or 0.0
        return found
