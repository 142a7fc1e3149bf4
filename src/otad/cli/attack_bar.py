"""The bar of an evaluation: which attack runs, and what stands so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from otad.progress import bars


@contextmanager
def attack_bar(*, of_values: bool = False) -> Iterator[Callable[[str, int, int, float], None]]:
    """Takes what an evaluation tells of its progress; `of_values`: a regression's worst case is
    an error, not a share."""
    with bars(passing=True) as bar:
        task = bar.add_task("attacking", total=None)

        def advance(label: str, done: int, total: int, worst: float) -> None:
            so_far = f"mean error {worst:.4g}" if of_values else f"worst case {worst:.1%}"
            bar.update(task, description=f"{label}: {so_far}", completed=done, total=total)

        yield advance
