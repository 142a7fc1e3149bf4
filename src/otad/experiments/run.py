"""`reproduce`: run experiments, one after the other or with several processes, to their records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from otad.attacks import L2
from otad.checks import check_device, require
from otad.data.dataset import refuse_repeats
from otad.errors import OtadError
from otad.evaluate.runner import evaluate
from otad.experiments.cache import UnfinishedError, WorkFolder
from otad.experiments.experiment import Experiment, read_experiment
from otad.experiments.figures import draw_costs, draw_curve
from otad.experiments.listing import experiments_for
from otad.experiments.probe import measure_costs, measure_speeds
from otad.experiments.records import RunRecord, SuiteRecord, code_fingerprint
from otad.experiments.rows import certified_scores, make_attacks, points_of
from otad.experiments.spec import CertifySpec
from otad.experiments.study import Study
from otad.io.codec import digest_of
from otad.io.environment import Environment
from otad.progress import PartReport, part_bars
from otad.report.evaluation_report import evaluation_report
from otad.report.examples import Adversarial
from otad.training.config import check_seed
from otad.workers import Workers, working

_MENDABLE = (OtadError, OSError)  # what the user can fix: reported without a traceback


def reproduce(name: str | Path, **options: Any) -> RunRecord:
    """Run one experiment and return its record; see `reproduce_together` for the options.

    Examples
    --------
    >>> from pathlib import Path
    >>> from otad.experiments import reproduce
    >>> _ = Path("points.toml").write_text('''
    ... title = "Points"
    ... data.points = {name = "synthetic", options = {dim = 8, train_size = 100, test_size = 20}}
    ... nets.small = {data = "points", train.epochs = 1}
    ... rows.otad = {net = "small", method = "otad"}
    ... ''')
    >>> record = reproduce("points.toml", out="results")
    >>> record.rows["otad"].score.n
    20
    """
    needed = experiments_for([name])
    require(len(needed) == 1, "name", "that of one experiment", f"{name}, of {needed}")
    return reproduce_together(needed, **options)[0]


def reproduce_together(
    names: Sequence[str | Path],
    *,
    executor: Executor | int | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    out: str | Path = "results",
    work: str | Path | None = None,
    seed: int = 0,
    quick: bool = False,
    max_seconds: float | None = None,
    progress: PartReport | bool | None = None,
) -> list[RunRecord]:
    """Run experiments, write a record of each to a folder, and return the records.

    An experiment that fails does not stop the others. All errors are raised together at the end.

    Parameters
    ----------
    names : sequence of str or Path
        Names of experiments (see `names`), TOML files, or labels of the paper's tables such as
        "tab:cw", which may need several experiments.
    executor : Executor, int or None
        Who trains, measures and attacks; see `otad.evaluate`. All machines must see the folders
        `data_dir` and `work` under the same paths. Speed is measured afterwards, by this process.
    data_dir : str or Path, optional
        The folder of the data sets; see `otad.data.load`.
    device : str
        Where to compute.
    out : str or Path
        The folder of `NAME.json`, of figures `NAME.svg` and of evaluations in the folder `NAME`.
    work : str or Path, optional
        The folder of finished parts, from which a stopped run resumes; by default `out/.work`.
    seed : int
        The seed.
    quick : bool
        Whether to make the changes listed under `[quick]`, which test the code within minutes. The
        record is then `NAME-quick.json`.
    max_seconds : float, optional
        After this time trainings stop with an `UnfinishedError`. They resume at the next call.
    progress : callable, bool or None
        A function of (part, steps done, all steps). True draws progress bars, False draws none, and
        None draws them on a terminal when the work takes longer than two seconds.

    Examples
    --------
    >>> from pathlib import Path
    >>> from otad.experiments import reproduce_together
    >>> text = '''
    ... title = "Points"
    ... data.points = {name = "synthetic", options = {dim = 8, train_size = 100, test_size = 20}}
    ... nets.small = {data = "points", train.epochs = 1}
    ... rows.otad = {net = "small", method = "otad"}
    ... '''
    >>> _ = [Path(name).write_text(text) for name in ("first.toml", "second.toml")]
    >>> records = reproduce_together(["first.toml", "second.toml"], out="results")
    >>> [record.name for record in records]
    ['first', 'second']
    """
    check_seed(seed)
    check_device(device)
    chosen = experiments_for(names)
    for listed in (names, chosen):
        refuse_repeats((Path(name).stem for name in listed), "names")
    experiments = [read_experiment(name, quick=quick) for name in chosen]
    deadline, out = None if max_seconds is None else time.time() + max_seconds, Path(out)
    folder = WorkFolder(Path(work or out / ".work"), deadline)
    make = partial(Study, work=folder, data_dir=data_dir, device=device, seed=seed)
    records: list[RunRecord] = []
    with working(executor) as workers, part_bars(progress) as report:
        errors = _share(plan(experiments), make, workers, report) if workers.count > 1 else {}
        for one in (one for one in experiments if one.name not in errors):
            try:
                records.append(run_experiment(make(experiment=one, report=report), out, workers))
            except _MENDABLE as error:
                errors[one.name] = error
        # Raised here, so that processes still at work for a failed experiment end.
        if errors and len(experiments) == 1:
            raise errors[experiments[0].name]
        if errors:
            unfinished = all(isinstance(error, UnfinishedError) for error in errors.values())
            text = "\n".join(f"{name}: {error}" for name, error in errors.items())
            raise (UnfinishedError if unfinished else OtadError)(text)
    return records


def run_experiment(study: Study, out: Path, workers: Workers) -> RunRecord:
    """Run all of an experiment, write its record to the folder `out`, and return it."""
    spec = study.experiment
    environment = Environment.now(torch.device(study.device), torch.get_num_threads())
    rows, nets = {}, {}
    for net in spec.nets:  # net by net, so that each bank is built once
        for key in (key for key, row in spec.rows.items() if row.net == net):
            attacks = {name: study.attack(key, name) for name in spec.rows[key].attacks}
            rows[key] = replace(study.row(key), attacks=attacks)
        found, tried = study.net(net).record, study.candidates.get(net, ())
        nets[net] = replace(found, regularity=study.regularity(net), candidates=tried)
    costs, missing = measure_costs(study)
    about = spec.name, spec.quick, spec.source, study.seed, code_fingerprint(), environment
    record = RunRecord(
        *about,
        data={key: study.source(key).record for key in spec.data},
        nets=nets,
        rows={key: rows[key] for key in spec.rows},
        seconds=study.seconds,
        costs=costs,
        missing=missing,
        suites=tuple(run_suite(study, out, key, workers) for key in spec.suites),
        metrics={key: study.metric(key).record for key in spec.metrics},
        surrogates={key: study.surrogate(key).record for key in spec.surrogates},
        purifiers={key: study.purifier(key).record for key in spec.purifiers},
        speeds=measure_speeds(study),
        jobs=workers.count,
    )
    with study.work.lock(spec.stem):
        record.write(out / f"{spec.stem}.json")
        if spec.cost is not None:
            draw_costs(costs, spec.cost.threads, out / f"{spec.stem}.svg")
        if spec.curve is not None:
            draw_curve(record, spec.curve.title, out / f"{spec.stem}.svg")
    return record


def run_suite(study: Study, out: Path, key: str, workers: Workers) -> SuiteRecord:
    """Evaluate a row of [evaluate], and write the evaluation and its report to a folder."""
    experiment, spec, row = study.experiment, study.experiment.evaluate, study.experiment.rows[key]
    assert spec is not None
    place = experiment.suites.index(key)
    folder = out / (experiment.stem + (f"-{place + 1}" if place else ""))
    work, label = study.work.folder / "suites" / folder.name, f"suite on {key}"
    model, data, train_x = study.defended(key), study.data(row), study.train_inputs(row)
    chosen = points_of(len(data.test_x), spec.points, study.seed)
    x, y = (part[chosen].to(model.backbone.mean.device) for part in (data.test_x, data.test_y))
    with study.work.lock(folder.name):
        names = ("eps", "skip_proved", "flags", "batch_size")
        how: dict[str, Any] = {name: getattr(spec, name) for name in names}
        how["attacks"] = make_attacks(spec.attacks, model, train_x) or "standard"
        how["progress"] = lambda attack, done, total, worst: study.report(label, done, total)
        how |= {"train_x": train_x, "seed": study.seed, "folder": work, "executor": workers}
        found = evaluate(model, x, y, L2(spec.headline), **how)
        study.seconds[label] = found.seconds
        found.write(folder / "evaluation.json")
        shown: dict[str, Any] = {"x": x, "y": y, "classes": data.classes, "train_x": train_x}
        shown["adversarial"] = Adversarial.read(work / "adversarial.safetensors")
        evaluation_report(found, model=model, **shown).write(folder / "report.html")
    certified, own = {}, (key,) if spec.certify else ()
    for one in own if place else spec.certify:
        with study.timed(f"certificates of {one}") as report:
            radii = CertifySpec(spec.eps)
            certified[one] = certified_scores(study.defended(one), x, y, radii, report)
    return SuiteRecord(key, folder.name, certified)


class Task(NamedTuple):
    """A call of a method of `Study` for the experiments `owners`."""

    experiment: Experiment
    method: str
    key: tuple[str, ...]
    owners: list[str]

    def __str__(self) -> str:
        return " ".join((f"{self.experiment.name}:", self.method, *self.key))


def plan(experiments: Iterable[Experiment]) -> list[list[Task]]:
    """Return the tasks in three phases, each of which needs the one before. What experiments share
    is one task."""
    phases: list[dict[str, Task]] = [{}, {}, {}]

    def add(phase: int, content: Any, one: Experiment, method: str, *key: str) -> None:
        task = phases[phase].setdefault(digest_of([method, content]), Task(one, method, key, []))
        task.owners.append(one.name)

    for one in experiments:
        for key, net in one.nets.items():
            choice = None if net.choose is None else one.rows[net.choose.row]
            add(0, [net, one.data[net.data], choice], one, "net", key)
        for key, metric in one.metrics.items():
            add(0, [metric, one.data[metric.data]], one, "metric", key)
        for key, surrogate in one.surrogates.items():
            row = one.rows[surrogate.row]
            searched = one.metrics.get(row.metric or "")
            add(1, [surrogate, row, one.nets[row.net], searched], one, "surrogate", key)
        for key, purifier in one.purifiers.items():
            cleaned = one.nets[purifier.net]
            add(1, [purifier, cleaned, one.data[cleaned.data]], one, "purifier", key)
        for key, row in one.rows.items():
            add(2, [one.name, key], one, "row", key)
            for name in row.attacks:
                add(2, [one.name, key, name], one, "attack", key, name)
    return [list(phase.values()) for phase in phases]


def _share(
    phases: list[list[Task]], make: Callable[..., Study], workers: Workers, report: PartReport
) -> dict[str, BaseException]:
    """Do all tasks; return the first error of each experiment that has one. When all have failed,
    nobody waits for the rest, except for trainings that ran out of time and save what they have."""
    errors: dict[str, BaseException] = {}
    names = {name for tasks in phases for task in tasks for name in task.owners}
    for tasks in phases:
        useful = [task for task in tasks if not set(task.owners) <= set(errors)]
        for task in useful:
            report(str(task), 0, 1)
        for number, error in workers.run(_work, (make,), ((task,) for task in useful)):
            report(str(useful[number]), 1, 1)
            if error is not None:
                errors = dict.fromkeys(useful[number].owners, error) | errors
                if errors.keys() == names and not isinstance(error, UnfinishedError):
                    return errors
    return errors


_LAST: dict[tuple[str, Callable[..., Study]], Study] = {}  # in a worker: that of the last task


def _work(make: Callable[..., Study], task: Task) -> OtadError | None:
    """Do a task, whose result is saved in the work folder, and return what the user can fix."""
    key = task.experiment.name, make
    if key not in _LAST:  # its bank and nets stay in memory for the next task of the experiment
        _LAST.clear()
        _LAST[key] = make(experiment=task.experiment, report=lambda part, done, total: None)
    try:
        getattr(_LAST[key], task.method)(*task.key)
    except UnfinishedError as error:
        return error
    except _MENDABLE as error:
        return OtadError(str(error))
    return None
