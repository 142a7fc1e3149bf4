"""Several experiments by several processes: whatever can be done at once is, what they share once.

A process does one job and ends. Over a pipe of its own it tells how far it is and, at its end, why
it failed if it did; what needs the failed job is not begun, the rest goes on.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from otad.checks import check_count
from otad.errors import OtadError
from otad.experiments.config import read_experiment
from otad.experiments.jobs import RECORD, Job, do, plan
from otad.experiments.kept import Deadline, UnfinishedError
from otad.experiments.progress import Report, reporting
from otad.experiments.records import RunRecord, stem_of
from otad.experiments.run import Workplace, run_whole

_TOLD_EVERY = 0.2  # seconds between two steps of one part


def reproduce_together(
    names: Sequence[str | Path],
    *,
    jobs: int,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    out: str | Path = "results",
    work: str | Path | None = None,
    seed: int = 0,
    quick: bool = False,
    max_seconds: float | None = None,
    progress: Report | bool = False,
) -> list[RunRecord]:
    """`reproduce` for several experiments: one after the other, or by up to `jobs` processes.

    By processes, experiments that measure speed do so last, with nothing beside them; other seconds
    in the records are those of a machine that is shared. A failure does not stop what does not
    depend on it (one after the other: the other experiments); at the end all are raised in one
    error.
    """
    check_count(jobs, "jobs")
    tasks = plan(list(names), quick=quick)
    place = Workplace(data_dir, device, Path(out), work, seed, quick, max_seconds)
    with reporting(progress) as report:
        run = _run_here if jobs == 1 else _run
        _raise(run(tasks, place, jobs, report))
    stems = (stem_of(read_experiment(name, quick=quick).name, quick) for name in names)
    return [RunRecord.read(place.out / f"{stem}.json") for stem in stems]


def _with_rest(place: Workplace, deadline: Deadline) -> Workplace:
    """With the time that is left, which may be none: finished trainings do without."""
    left = None if deadline.at is None else max(0.0, deadline.at - time.monotonic())
    return replace(place, max_seconds=left)


_MENDABLE = (OtadError, OSError)  # what the user can mend: told without a traceback


@dataclass(frozen=True)
class _Failure:
    why: str
    unfinished: bool = False

    @staticmethod
    def by(error: Exception) -> _Failure:
        return _Failure(str(error), isinstance(error, UnfinishedError))


def _raise(failures: dict[str, _Failure]) -> None:
    """One error for all, if there are any."""
    if failures:
        told = "\n".join(f"{label}: {failure.why}" for label, failure in failures.items())
        unfinished = all(failure.unfinished for failure in failures.values())
        raise (UnfinishedError if unfinished else OtadError)(told)


@dataclass
class _Hand:
    """A process at work."""

    job: Job
    process: BaseProcess
    line: Connection


@dataclass
class _State:
    """Which jobs wait, run, are done and have failed, by identity."""

    waiting: dict[str, Job]
    running: dict[str, _Hand] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    failed: dict[str, _Failure] = field(default_factory=dict)

    def next(self, most: int) -> Job | None:
        """One that may begin now: with all it needs done, and with room for it."""
        busy = [hand.job for hand in self.running.values()]
        if len(busy) >= most or any(job.timed for job in busy):
            return None
        ready = (job for job in self.waiting.values() if job.needs <= self.done)
        return next((job for job in ready if not (job.timed and busy)), None)

    def give_up(self, known: Collection[Job]) -> None:
        """Fail all that wait for something that has failed."""
        labels = {job.identity: job.label for job in known}
        while stuck := [job for job in self.waiting.values() if job.needs & set(self.failed)]:
            for job in stuck:
                cause = next(failed for failed in self.failed if failed in job.needs)
                failure = self.failed[cause]
                end = "is unfinished" if failure.unfinished else "failed"
                why = f"needs {labels[cause]}, which {end}"
                self.failed[job.identity] = replace(failure, why=why)
                del self.waiting[job.identity]


def _run_here(
    tasks: Sequence[Job], place: Workplace, _: int, report: Report
) -> dict[str, _Failure]:
    """Whole experiments one after the other; why those failed that did, by label."""
    deadline, failed = Deadline.after(place.max_seconds), {}
    for job in tasks:
        if job.kind == RECORD:
            try:
                run_whole(_with_rest(place, deadline).study(job.experiment, report), place.out)
            except _MENDABLE as error:
                failed[job.label] = _Failure.by(error)
    return failed


def _run(tasks: Sequence[Job], place: Workplace, jobs: int, report: Report) -> dict[str, _Failure]:
    """Why those failed that did, by label."""
    deadline = Deadline.after(place.max_seconds)
    state = _State({job.identity: job for job in tasks})
    try:
        while state.waiting or state.running:
            while (job := state.next(jobs)) is not None:
                del state.waiting[job.identity]
                state.running[job.identity] = _begin(job, _with_rest(place, deadline), jobs)
            for line in wait([hand.line for hand in state.running.values()]):
                hand = next(one for one in state.running.values() if one.line is line)
                _listen(hand, state, report)
            state.give_up(tasks)
    finally:
        for hand in state.running.values():
            hand.process.terminate()
    return {job.label: state.failed[job.identity] for job in tasks if job.identity in state.failed}


def _begin(job: Job, place: Workplace, jobs: int) -> _Hand:
    threads = torch.get_num_threads()
    if not job.timed:
        threads = max(1, threads // jobs)
    context = multiprocessing.get_context("spawn")  # a GPU's driver does not survive a fork
    line, other_end = context.Pipe(duplex=False)
    told = (job, place, jobs, threads, other_end)
    process = context.Process(target=_work, args=told, daemon=True)
    process.start()
    other_end.close()
    return _Hand(job, process, line)


def _listen(hand: _Hand, state: _State, report: Report) -> None:
    """Take one message of a process, or its end."""
    identity = hand.job.identity
    try:
        message = hand.line.recv()
    except EOFError:
        hand.process.join()
        hand.line.close()
        del state.running[identity]
        if identity not in state.failed and hand.process.exitcode == 0:
            state.done.add(identity)
        elif identity not in state.failed:
            why = f"its process ended with exit code {hand.process.exitcode}"
            state.failed[identity] = _Failure(why)
        return
    if isinstance(message, _Failure):
        state.failed[identity] = message
    else:
        part, done, total = message
        report(f"{Path(hand.job.experiment).stem}: {part}", done, total)


def _work(job: Job, place: Workplace, jobs: int, threads: int, line: Connection) -> None:
    """What a process does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        study = place.study(job.experiment, _sparing(lambda *step: line.send(step)))
        if job.kind == RECORD:
            run_whole(study, place.out, jobs=jobs)
        else:
            do(job, study, place.out)
    except _MENDABLE as error:
        line.send(_Failure.by(error))
    except Exception:
        line.send(_Failure(traceback.format_exc()))


def _end_with_parent() -> None:
    """Once the parent is gone, however it went, nobody waits for this: let go of all locks."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _sparing(report: Report) -> Report:
    """The same report, told of a part's first and last step and of others now and then."""
    told: dict[str, float] = {}

    def sparing(part: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - told.get(part, -_TOLD_EVERY) >= _TOLD_EVERY:
            told[part] = now
            report(part, done, total)

    return sparing
