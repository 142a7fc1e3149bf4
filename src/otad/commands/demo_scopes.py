"""The second model of the demo: the same net and bank in global scope."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otad.attacks import L2, Attack
from otad.commands.attack_bar import attack_bar
from otad.commands.defend import build_model, model_notes
from otad.commands.net_files import TrainedNet
from otad.data import Dataset
from otad.defense import OTAD
from otad.evaluate import evaluate
from otad.evaluate.suite import suite
from otad.report.assessment import assess
from otad.report.scopes import Contender

# Much of the time of a suite, and on one smooth map nothing that the others do not find.
LEFT_OUT = ("straight", "soft_knn", "square", "random_search")


def defend_globally(
    trained: TrainedNet,
    dataset: Dataset,
    folder: Path,
    *,
    attacked: int,
    eps: float,
    attacks: str | Sequence[str],
    seed: int,
    **options: Any,
) -> Contender:
    """The net with one map for its whole bank, saved in `folder`; the first so many test examples
    are certified, and attacked at eps by the attacks that are not `LEFT_OUT`."""
    model = build_model(trained, dataset, scope="global", **options)
    assessment = assess(model, dataset.test_x, dataset.test_y)
    model.notes = model_notes(trained.about, dataset, assessment)
    model.save(folder)
    with attack_bar() as progress:
        evaluation = evaluate(
            model,
            dataset.test_x[:attacked],
            dataset.test_y[:attacked],
            L2(eps),
            attacks=_few(attacks, model, dataset, eps),
            flags=False,
            seed=seed,
            progress=progress,
        )
    return Contender(model, assessment, evaluation)


def _few(
    attacks: str | Sequence[str], model: OTAD, dataset: Dataset, eps: float
) -> Sequence[str | Attack]:
    if not isinstance(attacks, str):
        return [name for name in attacks if name not in LEFT_OUT]
    made, _ = suite(model, attacks, dataset.input_shape, dataset.task, L2(eps))
    return [attack for attack in made if attack.name not in LEFT_OUT]
