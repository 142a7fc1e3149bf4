"""An experiment under way: its data, its nets and the parts that are finished.

Everything finished is kept in the work folder under the fingerprint of all it depends on, the
library's own source included, so a run that was killed goes on where it stopped, and experiments
share their nets. What is learned is the exception: it outlives a change of the source, and is
trained anew only if its folder is deleted.

Several processes may share a work folder and do different things at once, by `net`, `metric`,
`surrogate` and so on: see `jobs` for what needs what. Two that ask for the same thing do not do it
twice: the second waits for the first (see `kept`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from otad.data import load
from otad.errors import InputError
from otad.experiments.attack_records import AttackedScore
from otad.experiments.attacked import attack_row, points_of
from otad.experiments.banks import Keyed, bank_rows, keys_of, searched, whole_bank
from otad.experiments.config import Experiment, RowSpec
from otad.experiments.kept import Deadline, alone
from otad.experiments.metrics import TrainedMetric, trained_metric
from otad.experiments.nets import Source, Trained, train_net
from otad.experiments.part_specs import Choice, NetSpec
from otad.experiments.potentials import PotentialFound
from otad.experiments.progress import Report
from otad.experiments.records import Candidate, Regularity, RowRecord, code_fingerprint
from otad.experiments.rows import (
    OTAD_SETTINGS,
    SEARCH_SETTINGS,
    defended,
    evaluate_row,
    measure_regularity,
    predictor,
)
from otad.experiments.specs import name_of
from otad.experiments.surrogates import TrainedSurrogate, trained_surrogate
from otad.io.codec import digest_of, from_plain, read_json, to_plain, write_json
from otad.model.otad import OTAD

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
        max_seconds: float | None = None,
    ) -> None:
        """After `max_seconds` trainings stop, to go on another time, with an `UnfinishedError`."""
        self.experiment = experiment
        self.device = device
        self.work = work
        self.seed = seed
        self.report = report
        self.code = code_fingerprint()
        self.seconds: dict[str, float] = {}
        self._data_dir = data_dir
        self._deadline = Deadline.after(max_seconds)
        self._sources: dict[str, Source] = {}
        self._nets: dict[str, Trained] = {}
        self._metrics: dict[str, TrainedMetric] = {}
        self._surrogates: dict[str, TrainedSurrogate] = {}
        self._keyed: dict[str, Keyed] = {}
        self._bank: tuple[str, OTAD] | None = None

    def part(
        self, label: str, kind: type[T], identity: dict[str, Any], compute: Callable[[], T]
    ) -> T:
        """What `compute` gives, or gave in an earlier run on the same things."""
        depends = identity | {"code": self.code, "device": self.device, "seed": self.seed}
        digest = digest_of(depends)
        path = self.work / "parts" / f"{digest}.json"
        with alone(self.work / "locks" / digest):
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
            if data.task == "regression":
                self.experiment.refuse_values(key)
            if points := self.experiment.points_on(key):
                points_of(len(data.test_x), points, self.seed)  # refused now, not after training
            self._sources[key] = Source(data, data.fingerprint())
            self.report(f"load {key}", 1, 1)
        return self._sources[key]

    def net(self, key: str) -> Trained:
        """A net of the experiment, trained (or taken from the work folder) on first use."""
        if key not in self._nets:
            spec = self.experiment.nets[key]
            settings = dict(spec.settings)
            candidates: tuple[Candidate, ...] = ()
            if spec.choose is not None:
                candidates = self._candidates(key, spec, spec.choose)
                best = max(candidates, key=lambda candidate: candidate.score.rank)
                settings[spec.choose.setting] = best.value
            trained = self._train(f"train {key}", spec, self.source(spec.data), settings)
            self._nets[key] = replace(trained, candidates=candidates)
        return self._nets[key]

    def metric(self, key: str) -> TrainedMetric:
        """A metric of the experiment, trained (or taken from the work folder) on first use."""
        if key not in self._metrics:
            spec, label = self.experiment.metrics[key], f"train metric {key}"
            found = trained_metric(spec, self.source(spec.data), **self._training(label, "metrics"))
            self.seconds[label] = found.seconds
            self._metrics[key] = found
        return self._metrics[key]

    def surrogate(self, key: str) -> TrainedSurrogate:
        """A surrogate of the experiment, trained (or taken from the work folder) on first use."""
        if key not in self._surrogates:
            spec, label = self.experiment.surrogates[key], f"train surrogate {key}"
            row = self.experiment.rows[spec.row]
            found = trained_surrogate(
                spec,
                defended(self.base(row), row),
                self._identity(row) | self._settings(row),
                **self._training(label, "surrogates"),
            )
            self.seconds[label] = found.seconds
            self._surrogates[key] = found
        return self._surrogates[key]

    def row(self, key: str) -> RowRecord:
        """A line of the table, with all attacks on it."""
        attacks = {name: self.attack(key, name) for name in self.experiment.rows[key].attacks}
        return replace(self.unattacked(key), attacks=attacks)

    def unattacked(self, key: str) -> RowRecord:
        """A line of the table before any attack."""
        spec = replace(self.experiment.rows[key], attacks={})
        return self._row(key, spec, self.net(spec.net), partial(self.base, spec))

    def attack(self, key: str, name: str) -> AttackedScore:
        """What an attack leaves of a row."""
        row, label = self.experiment.rows[key], f"{key}: {name}"
        spec, trained = row.attacks[name], self.net(row.net)
        base = partial(self.base, row)
        found = self._potential(row, trained, base)
        surrogate = None if row.surrogate is None else self.surrogate(row.surrogate).net
        record = self.part(
            label,
            AttackedScore,
            self.identity(key) | {"attack": to_plain(spec)},
            lambda: attack_row(
                spec,
                row,
                base(),
                trained.data,
                bank_rows=self.bank_rows(row),
                seed=self.seed,
                report=partial(self.report, label),
                potential=None if found is None else found.potential,
                surrogate=surrogate,
            ),
        )
        self.seconds[label] = record.seconds
        return record

    def bank(self, net: str) -> OTAD:
        """OTAD over the bank of a net. One is kept: rows come net by net, and banks are large."""
        if self._bank is None or self._bank[0] != net:
            trained, self._bank = self.net(net), None
            label, started = f"bank of {net}", time.perf_counter()
            self._bank = net, self._whole_bank(net, trained, label)
            self.seconds[label] = time.perf_counter() - started
        return self._bank[1]

    def base(self, row: RowSpec) -> OTAD:
        """OTAD over the bank of a row, searched as the row says."""
        keyed = None if row.metric is None else self._keys(row.metric)
        return searched(self.bank(row.net), keyed, self.bank_rows(row))

    def bank_rows(self, row: RowSpec) -> Tensor | None:
        """Which points of the train part the bank of a row has, None for all."""
        labels = self.net(row.net).data.train_y
        keys = self._keys(row.metric).keys if row.central and row.metric else None
        return bank_rows(labels, row.per_class, self.seed, keys)

    def model(self, key: str) -> nn.Module:
        """What answers in a row."""
        row = self.experiment.rows[key]
        found = self._potential(row, self.net(row.net), partial(self.base, row))
        potential = None if found is None else found.potential
        surrogate = None if row.surrogate is None else self.surrogate(row.surrogate).net
        return predictor(self.base(row), row, potential, surrogate)

    def defended(self, key: str) -> OTAD:
        """The model of a row of OTAD."""
        model = self.model(key)
        if not isinstance(model, OTAD):
            raise InputError(f"rows.{key}.method: expected otad, got {type(model).__name__}")
        return model

    def identity(self, key: str) -> dict[str, Any]:
        """All that decides the answers of a row's model."""
        row = self.experiment.rows[key]
        return self._identity(row) | self._settings(row)

    def _identity(self, row: RowSpec, trained: Trained | None = None) -> dict[str, Any]:
        """What a row's model is made of: net, data, metric, surrogate."""
        found: dict[str, Any] = dict((trained or self.net(row.net)).identity)
        net = self.experiment.nets[row.net]
        found |= {"bank": [net.bank, net.resident]}
        if row.metric is not None:
            found["metric"] = self.metric(row.metric).identity
        if row.surrogate is not None:
            found["surrogate"] = self.surrogate(row.surrogate).identity
        return found

    def _settings(self, row: RowSpec) -> dict[str, Any]:
        names = ("method", *OTAD_SETTINGS, *SEARCH_SETTINGS)
        return {"model": to_plain({name: getattr(row, name) for name in names})}

    def _keys(self, key: str) -> Keyed:
        """The keys of the whole train part, made once."""
        if key not in self._keyed:
            label, started = f"keys by {key}", time.perf_counter()
            metric = self.metric(key).metric
            x = self.source(self.experiment.metrics[key].data).data.train_x
            self._keyed[key] = keys_of(metric, x, partial(self.report, label))
            self.seconds[label] = time.perf_counter() - started
        return self._keyed[key]

    def _whole_bank(self, key: str, trained: Trained, label: str) -> OTAD:
        made_by = digest_of({"code": self.code, "device": self.device})
        spec, folder = self.experiment.nets[key], self.work / "banks" / made_by
        return whole_bank(trained, spec, folder, partial(self.report, label))

    def _training(self, label: str, folder: str) -> dict[str, Any]:
        """What every training is told."""
        return {
            "seed": self.seed,
            "device": self.device,
            "folder": self.work / folder,
            "report": partial(self.report, label),
            "deadline": self._deadline,
        }

    def _train(
        self, label: str, spec: NetSpec, source: Source, settings: dict[str, Any]
    ) -> Trained:
        trained = train_net(spec, source, settings, **self._training(label, "nets"))
        self.seconds[label] = trained.seconds
        return trained

    def _candidates(self, key: str, spec: NetSpec, choice: Choice) -> tuple[Candidate, ...]:
        source = self.source(spec.data).validation_part(choice.validation, self.seed)
        row = replace(self.experiment.rows[choice.row], lipschitz=None, attacks={})
        found = []
        for value in choice.values:
            label = f"{key} with {choice.setting} = {value:g}"
            settings = spec.settings | {choice.setting: value}
            if choice.epochs is not None:
                settings["epochs"] = choice.epochs
            trained = self._train(f"try {label}", spec, source, settings)
            bank = partial(self._candidate_base, key, trained, row, f"bank of {label}")
            record = self._row(f"validate {label}", row, trained, bank)
            chosen_by = choice.certified
            score = record.score if chosen_by is None else record.certified[name_of(chosen_by)]
            found.append(Candidate(value, score))
        return tuple(found)

    def _candidate_base(self, key: str, trained: Trained, row: RowSpec, label: str) -> OTAD:
        rows = bank_rows(trained.data.train_y, row.per_class, self.seed)
        return searched(self._whole_bank(key, trained, label), None, rows)

    def _row(
        self, label: str, spec: RowSpec, trained: Trained, base: Callable[[], OTAD]
    ) -> RowRecord:
        data_key = self.experiment.nets[spec.net].data
        surrogate = None if spec.surrogate is None else self.surrogate(spec.surrogate).net
        record = self.part(
            label,
            RowRecord,
            self._identity(spec, trained) | {"row": to_plain(spec), "of": data_key},
            lambda: evaluate_row(
                spec,
                base(),
                trained.data,
                data_key,
                seed=self.seed,
                report=partial(self.report, label),
                potential=self._potential(spec, trained, base),
                surrogate=surrogate,
            ),
        )
        self.seconds[label] = record.seconds
        return record

    def _potential(
        self, spec: RowSpec, trained: Trained, bank: Callable[[], OTAD]
    ) -> PotentialFound | None:
        """The one potential of a row in global scope, kept in the work folder once it is found."""
        if spec.method != "otad" or spec.scope == "local":
            return None
        asked = (spec.smoothness, spec.strong_convexity)
        depends = {"potential": asked, "code": self.code, "device": self.device}
        digest = digest_of(self._identity(spec, trained) | depends)
        path = self.work / "potentials" / f"{digest}.safetensors"
        with alone(self.work / "locks" / digest):
            if path.exists():
                return PotentialFound.read(path)
            label = f"potential of {spec.net}"
            report = partial(self.report, label)
            found = PotentialFound.find(bank().bank, *asked, report, lift=trained.net.lift)
            self.seconds[label] = found.record.seconds
            found.write(path)
            return found

    def regularity(self, key: str) -> Regularity | None:
        """For nets that OTAD defends by neighbors in some row, with those of the first such row."""
        specs = [row for row in self.experiment.rows.values() if row.net == key]
        row = next((row for row in specs if (row.method, row.scope) == ("otad", "local")), None)
        if row is None:
            return None
        row, label = replace(row, surrogate=None), f"regularity of {key}"
        asked = [row.n_neighbors, row.strong_convexity, row.per_class, row.central]
        record = self.part(
            label,
            Regularity,
            self._identity(row) | {"neighborhoods": asked},
            partial(self._measure_regularity, row, partial(self.report, label)),
        )
        self.seconds[label] = record.seconds
        return record

    def _measure_regularity(self, row: RowSpec, report: Callable[[int, int], None]) -> Regularity:
        model, generator = defended(self.base(row), row), torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(model.bank_inputs), generator=generator)[:_VIOLATION_ROWS]
        return measure_regularity(model, self.net(row.net).data, chosen, report=report)
