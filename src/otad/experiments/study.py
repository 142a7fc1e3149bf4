"""An experiment under way: its data, its nets and the parts that are finished.

Everything finished is kept in the work folder under the fingerprint of all it depends on, the
library's own source included, so a run that was killed goes on where it stopped, and experiments
share their nets. Nets are the exception: a checkpoint outlives a change of the source, and is
trained anew only if the folder is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from otad.codec import digest_of, from_plain, read_json, to_plain, write_json
from otad.data import load
from otad.defense import OTAD
from otad.experiments.attack_records import AttackedScore
from otad.experiments.attacked import attack_row, points_of
from otad.experiments.config import Choice, Experiment, NetSpec, RowSpec
from otad.experiments.nets import Source, Trained, train_net
from otad.experiments.potentials import PotentialFound
from otad.experiments.progress import Report
from otad.experiments.records import (
    Candidate,
    DataRecord,
    NetRecord,
    Regularity,
    RowRecord,
    code_fingerprint,
)
from otad.experiments.rows import OTAD_SETTINGS, defended, evaluate_row, measure_regularity
from otad.experiments.specs import name_of

T = TypeVar("T")
_VIOLATION_ROWS = 10_000


class Study:
    """Loads, trains and measures what the rows of an experiment ask for, each thing once."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        data_dir: str | Path | None,
        device: str,
        work: Path,
        seed: int,
        report: Report,
    ) -> None:
        self.experiment = experiment
        self.device = device
        self.work = work
        self.seed = seed
        self.report = report
        self.code = code_fingerprint()
        self.seconds: dict[str, float] = {}
        self._data_dir = data_dir
        self._sources: dict[str, Source] = {}
        self._nets: dict[str, Trained] = {}
        self._bank: tuple[str, OTAD] | None = None

    def part(
        self, label: str, kind: type[T], identity: dict[str, Any], compute: Callable[[], T]
    ) -> T:
        """What `compute` gives, or gave in an earlier run on the same things."""
        depends = identity | {"code": self.code, "device": self.device, "seed": self.seed}
        path = self.work / "parts" / f"{digest_of(depends)}.json"
        if path.exists():
            self.report(label, 1, 1)
            found: T = from_plain(kind, read_json(path), path.name)
            return found
        computed = compute()
        write_json(path, to_plain(computed))
        return computed

    def source(self, key: str) -> Source:
        """A data set of the experiment, loaded on first use."""
        if key not in self._sources:
            self.report(f"load {key}", 0, 1)
            spec = self.experiment.data[key]
            data = load(spec.name, self._data_dir, seed=self.seed, **spec.options)
            if points := self.experiment.points_on(key):
                points_of(len(data.test_x), points, self.seed)  # refused now, not after training
            self._sources[key] = Source(data, data.fingerprint())
            self.report(f"load {key}", 1, 1)
        return self._sources[key]

    def net(self, key: str) -> Trained:
        """A net of the experiment, trained (or taken from the work folder) on first use."""
        if key not in self._nets:
            spec = self.experiment.nets[key]
            settings = dict(spec.train)
            candidates: tuple[Candidate, ...] = ()
            if spec.choose is not None:
                candidates = self._candidates(key, spec, spec.choose)
                best = max(candidates, key=lambda candidate: candidate.score.rank)
                settings[spec.choose.setting] = best.value
            trained = self._train(f"train {key}", spec, self.source(spec.data), settings)
            self._nets[key] = replace(trained, candidates=candidates)
        return self._nets[key]

    def row(self, key: str) -> RowRecord:
        """A line of the table, with all attacks on it."""
        spec = self.experiment.rows[key]
        plain = replace(spec, attacks={})
        record = self._row(key, plain, self.net(spec.net), partial(self.bank, spec.net))
        return replace(record, attacks={name: self._attack(key, name) for name in spec.attacks})

    def bank(self, net: str) -> OTAD:
        """OTAD over the bank of a net. One is kept: rows come net by net, and banks are large."""
        if self._bank is None or self._bank[0] != net:
            trained, self._bank = self.net(net), None
            label, started = f"bank of {net}", time.perf_counter()
            self._bank = net, trained.base(partial(self.report, label))
            self.seconds[label] = time.perf_counter() - started
        return self._bank[1]

    def data_record(self, key: str) -> DataRecord:
        source = self.source(key)
        return DataRecord(
            name=source.data.name,
            options=self.experiment.data[key].options,
            train_size=len(source.data.train_x),
            test_size=len(source.data.test_x),
            input_shape=source.data.input_shape,
            classes=len(source.data.classes),
            fingerprint=source.fingerprint,
            source=source.data.source,
        )

    def net_record(self, key: str) -> NetRecord:
        spec, trained = self.experiment.nets[key], self.net(key)
        return NetRecord(
            data=spec.data,
            blocks=spec.blocks,
            residual=spec.residual,
            normalize=spec.normalize,
            train=asdict(trained.config),
            train_score=trained.train_score,
            weights=trained.identity["weights"],
            seconds=trained.seconds,
            regularity=self._regularity(key, trained),
            candidates=trained.candidates,
            kind=spec.kind,
            options=spec.options,
        )

    def _train(
        self, label: str, spec: NetSpec, source: Source, settings: dict[str, Any]
    ) -> Trained:
        trained = train_net(
            spec,
            source,
            settings,
            seed=self.seed,
            device=self.device,
            folder=self.work / "nets",
            report=partial(self.report, label),
        )
        self.seconds[label] = trained.seconds
        return trained

    def _candidates(self, key: str, spec: NetSpec, choice: Choice) -> tuple[Candidate, ...]:
        source = self.source(spec.data).validation_part(choice.validation, self.seed)
        row = replace(self.experiment.rows[choice.row], lipschitz=None, attacks={})
        found = []
        for value in choice.values:
            label = f"{key} with {choice.setting} = {value:g}"
            settings = spec.train | {choice.setting: value}
            if choice.epochs is not None:
                settings["epochs"] = choice.epochs
            trained = self._train(f"try {label}", spec, source, settings)
            bank = partial(trained.base, partial(self.report, f"bank of {label}"))
            record = self._row(f"validate {label}", row, trained, bank)
            chosen_by = choice.certified
            score = record.score if chosen_by is None else record.certified[name_of(chosen_by)]
            found.append(Candidate(value, score))
        return tuple(found)

    def _row(
        self, label: str, spec: RowSpec, trained: Trained, bank: Callable[[], OTAD]
    ) -> RowRecord:
        data_key = self.experiment.nets[spec.net].data
        record = self.part(
            label,
            RowRecord,
            trained.identity | {"row": to_plain(spec), "of": data_key},
            lambda: evaluate_row(
                spec,
                bank(),
                trained.data,
                data_key,
                seed=self.seed,
                report=partial(self.report, label),
                potential=self._potential(spec, trained, bank),
            ),
        )
        self.seconds[label] = record.seconds
        return record

    def defended(self, key: str) -> OTAD:
        """The model of a row of OTAD."""
        spec = self.experiment.rows[key]
        bank = partial(self.bank, spec.net)
        found = self._potential(spec, self.net(spec.net), bank)
        return defended(bank(), spec, None if found is None else found.potential)

    def _potential(
        self, spec: RowSpec, trained: Trained, bank: Callable[[], OTAD]
    ) -> PotentialFound | None:
        """The one potential of a row in global scope, kept in the work folder once it is found."""
        if spec.method != "otad" or spec.scope == "local":
            return None
        asked = (spec.smoothness, spec.strong_convexity)
        depends = trained.identity | {"potential": asked, "code": self.code, "device": self.device}
        path = self.work / "potentials" / f"{digest_of(depends)}.safetensors"
        if path.exists():
            return PotentialFound.read(path)
        label = f"potential of {spec.net}"
        report = partial(self.report, label)
        found = PotentialFound.find(bank().bank, *asked, report, lift=trained.net.lift)
        self.seconds[label] = found.record.seconds
        found.write(path)
        return found

    def _attack(self, key: str, name: str) -> AttackedScore:
        row, label = self.experiment.rows[key], f"{key}: {name}"
        spec, trained = row.attacks[name], self.net(row.net)
        found = self._potential(row, trained, partial(self.bank, row.net))
        model = {"method": row.method, **{one: getattr(row, one) for one in OTAD_SETTINGS}}
        record = self.part(
            label,
            AttackedScore,
            trained.identity | {"model": to_plain(model), "attack": to_plain(spec)},
            lambda: attack_row(
                spec,
                row,
                self.bank(row.net),
                trained.data,
                seed=self.seed,
                report=partial(self.report, label),
                potential=None if found is None else found.potential,
            ),
        )
        self.seconds[label] = record.seconds
        return record

    def _regularity(self, key: str, trained: Trained) -> Regularity | None:
        """For nets that OTAD defends by neighbors in some row, with those of the first such row."""
        specs = [row for row in self.experiment.rows.values() if row.net == key]
        row = next((row for row in specs if (row.method, row.scope) == ("otad", "local")), None)
        if row is None:
            return None
        label = f"regularity of {key}"
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(trained.data.train_x), generator=generator)[:_VIOLATION_ROWS]
        record = self.part(
            label,
            Regularity,
            trained.identity | {"neighbors": row.n_neighbors, "convexity": row.strong_convexity},
            lambda: measure_regularity(
                defended(self.bank(key), row),
                trained.data,
                chosen,
                report=partial(self.report, label),
            ),
        )
        self.seconds[label] = record.seconds
        return record
