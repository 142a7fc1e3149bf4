"""Further models of the demo: the same net and bank in global scope, and points without a net."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otad.attacks import L2, Attack
from otad.cli.console import attack_bar
from otad.cli.defend import build_model, model_notes
from otad.cli.sources import TrainedNet
from otad.data import Dataset
from otad.evaluate import Evaluation, evaluate
from otad.evaluate.suite import suite
from otad.model.otad import OTAD
from otad.model.prototypes import prototype_net
from otad.nets import lifted_net
from otad.report.assessment import assess
from otad.report.model_report import Contender

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
    evaluation = _evaluated(model, dataset, attacked, eps, attacks, seed)
    return Contender("global", model, assessment, evaluation)


def map_of_points(
    dataset: Dataset,
    *,
    attacked: int,
    eps: float,
    attacks: str | Sequence[str],
    seed: int,
    n_neighbors: int,
) -> Contender:
    """No net: one map through the training points, each of which answers with its own label."""
    frame = lifted_net(dataset.input_shape, len(dataset.classes), blocks=0, bounds=dataset.bounds)
    points = prototype_net(frame, dataset.train_x, dataset.train_y, neighbors=1)
    model = OTAD(points, points.bank(), scope="global", n_neighbors=n_neighbors).eval()
    assessment = assess(model, dataset.test_x, dataset.test_y)
    evaluation = _evaluated(model, dataset, attacked, eps, attacks, seed)
    return Contender("global, no net", model, assessment, evaluation)


def _evaluated(
    model: OTAD,
    dataset: Dataset,
    attacked: int,
    eps: float,
    attacks: str | Sequence[str],
    seed: int,
) -> Evaluation:
    with attack_bar() as progress:
        return evaluate(
            model,
            dataset.test_x[:attacked],
            dataset.test_y[:attacked],
            L2(eps),
            attacks=_few(attacks, model, dataset, eps),
            flags=False,
            seed=seed,
            progress=progress,
        )


def _few(
    attacks: str | Sequence[str], model: OTAD, dataset: Dataset, eps: float
) -> Sequence[str | Attack]:
    if not isinstance(attacks, str):
        return [name for name in attacks if name not in LEFT_OUT]
    made, _ = suite(model, attacks, dataset.input_shape, dataset.task, L2(eps))
    return [attack for attack in made if attack.name not in LEFT_OUT]
