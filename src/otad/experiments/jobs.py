"""Experiments as jobs: what each is, and which others have to be done before it.

A row needs its net, its metric and its CIP-net, which needs the net and the metric of the row that
it learns from; the record of an experiment needs all the rest. What a job finds it leaves in the
work folder, where those that need it look (see `study`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from otad.data.dataset import refuse_repeats
from otad.experiments.config import Experiment, RowSpec, read_experiment
from otad.experiments.records import stem_of
from otad.experiments.study import Study
from otad.experiments.suites import run_suite, suites_of
from otad.io.codec import digest_of


@dataclass(frozen=True)
class Job:
    """One thing to be done for an experiment, named by its `key` among those of its `kind`.

    `identity` is the same for two jobs that do the same thing, of whatever experiments; `needs` are
    the identities of others. A `timed` job must have the machine to itself.
    """

    experiment: str | Path
    kind: str
    key: tuple[str, ...]
    identity: str
    needs: frozenset[str] = frozenset()
    timed: bool = False

    @property
    def label(self) -> str:
        return " ".join((Path(self.experiment).stem, self.kind, *self.key))


RECORD = "record"
_DOES: dict[str, Callable[..., object]] = {
    "net": Study.net,
    "metric": Study.metric,
    "surrogate": Study.surrogate,
    "row": Study.unattacked,
    "attack": Study.attack,
}


def plan(names: list[str | Path], *, quick: bool) -> list[Job]:
    """The jobs of some experiments, those that several of them share once; needs come first."""
    refuse_repeats((Path(name).stem for name in names), "names")  # records are files of such names
    found: dict[str, Job] = {}
    for name in names:
        own = list(_Jobs(name, read_experiment(name, quick=quick)))
        found = found | {job.identity: job for job in own if job.identity not in found}
    order = ("net", "metric", "surrogate", "suite", "row", "attack", RECORD)
    return sorted(found.values(), key=lambda job: (job.timed, order.index(job.kind)))


def do(job: Job, study: Study, out: Path) -> None:
    """A job other than that of the record."""
    if job.kind == "suite":
        spec = study.experiment.evaluate
        assert spec is not None
        stem = stem_of(study.experiment.name, study.experiment.quick)
        for own, folder in suites_of(spec, stem):
            if own.row == job.key[0]:
                run_suite(study, own, out, folder)
    else:
        _DOES[job.kind](study, *job.key)


class _Jobs:
    """The jobs of one experiment."""

    def __init__(self, name: str | Path, experiment: Experiment) -> None:
        self.name, self.experiment = name, experiment

    def __iter__(self) -> Iterator[Job]:
        of = self.experiment
        yield from (self._job("net", key, self._net(key)) for key in of.nets)
        yield from (self._job("metric", key, self._metric(key)) for key in of.metrics)
        for key, surrogate in of.surrogates.items():
            taught = of.rows[surrogate.row]
            yield self._job("surrogate", key, self._surrogate(key), self._needs(taught))
        parts = []
        for key, row in of.rows.items():
            parts.append(self._job("row", key, self._own("row", key), self._needs(row)))
            for attack in row.attacks:
                identity = self._own("attack", key, attack)
                parts.append(self._job("attack", (key, attack), identity, self._needs(row)))
        if of.evaluate is not None:
            for own, _ in suites_of(of.evaluate, ""):
                needs = [self._needs(of.rows[key]) for key in (own.row, *own.certify)]
                identity = self._own("suite", own.row)
                parts.append(self._job("suite", own.row, identity, frozenset().union(*needs)))
        yield from parts
        every = [*map(self._net, of.nets), *map(self._metric, of.metrics)]
        every += [*map(self._surrogate, of.surrogates), *(job.identity for job in parts)]
        timed = of.cost is not None or of.speed is not None
        yield Job(self.name, RECORD, (), self._own(RECORD), frozenset(every), timed)

    def _job(
        self,
        kind: str,
        key: str | tuple[str, ...],
        identity: str,
        needs: frozenset[str] = frozenset(),
    ) -> Job:
        return Job(self.name, kind, (key,) if isinstance(key, str) else key, identity, needs)

    def _needs(self, row: RowSpec) -> frozenset[str]:
        found = [self._net(row.net)]
        found += [] if row.metric is None else [self._metric(row.metric)]
        found += [] if row.surrogate is None else [self._surrogate(row.surrogate)]
        return frozenset(found)

    def _net(self, key: str) -> str:
        spec = self.experiment.nets[key]
        choice = None if spec.choose is None else self.experiment.rows[spec.choose.row]
        return digest_of(["net", spec, self.experiment.data[spec.data], choice])

    def _metric(self, key: str) -> str:
        spec = self.experiment.metrics[key]
        return digest_of(["metric", spec, self.experiment.data[spec.data]])

    def _surrogate(self, key: str) -> str:
        spec = self.experiment.surrogates[key]
        taught = self.experiment.rows[spec.row]
        return digest_of(["surrogate", spec, taught, sorted(self._needs(taught))])

    def _own(self, *what: str) -> str:
        return digest_of([str(self.name), *what])
