"""`reproduce`: run an experiment and write its record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from otad.errors import InputError
from otad.experiments.attack_records import SuiteRecord
from otad.experiments.config import Experiment, read_experiment
from otad.experiments.cost import measure_costs
from otad.experiments.described import (
    data_record,
    metric_record,
    net_record,
    surrogate_record,
)
from otad.experiments.kept import alone
from otad.experiments.plots import draw_costs, draw_curve
from otad.experiments.progress import Report, reporting
from otad.experiments.records import CostRecord, RowRecord, RunRecord, stem_of
from otad.experiments.speed import measure_speeds
from otad.experiments.study import Study
from otad.experiments.suites import run_suites
from otad.io.environment import Environment
from otad.training.config import check_seed

WORK = ".work"


def reproduce(
    name: str | Path,
    *,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    out: str | Path = "results",
    work: str | Path | None = None,
    seed: int = 0,
    quick: bool = False,
    max_seconds: float | None = None,
    progress: Report | bool = False,
) -> RunRecord:
    """Run the experiment `name` (see `names`) or that of a TOML file; write `out`/NAME.json.

    Figures go beside it as NAME.svg, an evaluation by the whole suite to the folder NAME.

    Finished parts and trained nets are kept in `work` (`out`/.work by default), which experiments
    may share: a killed run goes on where it stopped. `quick` makes the changes the file names under
    [quick], to try the machinery out in seconds; its record is NAME-quick.json and no result.
    Trainings stop with an `UnfinishedError` rather than run beyond `max_seconds`, and go on then.
    `progress` draws a line per part, or is called with (part, steps done, all steps).
    """
    place = Workplace(data_dir, device, Path(out), work, seed, quick, max_seconds)
    with reporting(progress) as report:
        return run_whole(place.study(name, report), place.out)


@dataclass(frozen=True)
class Workplace:
    """Where and how experiments are run, as `reproduce` is told."""

    data_dir: str | Path | None
    device: str
    out: Path
    work: str | Path | None
    seed: int
    quick: bool
    max_seconds: float | None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(
                f"device: expected one that is present, got {self.device!r} without CUDA"
            )

    def study(self, name: str | Path, report: Report) -> Study:
        """An experiment, begun or taken up."""
        return Study(
            read_experiment(name, quick=self.quick),
            data_dir=self.data_dir,
            device=self.device,
            work=self.out / WORK if self.work is None else Path(self.work),
            seed=self.seed,
            report=report,
            max_seconds=self.max_seconds,
        )


def run_whole(study: Study, out: Path, *, jobs: int = 1) -> RunRecord:
    """All of an experiment, to its record in `out`; up to `jobs` processes share the machine."""
    experiment = study.experiment
    environment = Environment.now(torch.device(study.device), torch.get_num_threads())
    record = replace(_record(experiment, study, environment, out), jobs=jobs)
    with alone(study.work / "locks" / record.file_stem):
        _write(record, experiment, out)
    return record


def _write(record: RunRecord, experiment: Experiment, out: Path) -> None:
    record.write(out / f"{record.file_stem}.json")
    if record.costs:
        draw_costs(record.costs, out / f"{record.file_stem}.svg")
    if experiment.curve is not None:
        draw_curve(record.rows.values(), experiment.curve.title, out / f"{record.file_stem}.svg")


def _record(experiment: Experiment, study: Study, environment: Environment, out: Path) -> RunRecord:
    # Net by net, so that each bank is built once; in the record, the order of the file.
    rows: dict[str, RowRecord] = {}
    nets = {}
    for net in experiment.nets:
        rows |= {key: study.row(key) for key, row in experiment.rows.items() if row.net == net}
        nets[net] = net_record(study, net)
    costs: tuple[CostRecord, ...] = ()
    missing: dict[str, str] = {}
    if experiment.cost is not None:
        costs, missing = measure_costs(study, experiment.cost)
    suites: tuple[SuiteRecord | None, ...] = (None,)
    if experiment.evaluate is not None:
        stem = stem_of(experiment.name, experiment.quick)
        suites = run_suites(study, experiment.evaluate, out, stem)
    return RunRecord(
        name=experiment.name,
        title=experiment.title,
        note=experiment.note,
        quick=experiment.quick,
        config=experiment.source,
        seed=study.seed,
        code=study.code,
        environment=environment,
        data={key: data_record(study, key) for key in experiment.data},
        nets=nets,
        rows={key: rows[key] for key in experiment.rows},
        seconds=study.seconds,
        costs=costs,
        missing=missing,
        suite=suites[0],
        beside=tuple(one for one in suites[1:] if one is not None),
        metrics={key: metric_record(study, key) for key in experiment.metrics},
        surrogates={key: surrogate_record(study, key) for key in experiment.surrogates},
        speeds=() if experiment.speed is None else measure_speeds(study, experiment.speed),
    )
