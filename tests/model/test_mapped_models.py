"""A model whose bank stays in its file: rows are read from there, never through the map.

Here the mapped tensors are zeros, registered as rows of the file: code that reads the tensors
themselves finds zeros, and gives another answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import BRIEF, SHAPE, K, exact, images, small_net
from torch import Tensor

from otad.certify import certify, certify_values
from otad.certify.cell import steady_map
from otad.certify.input_reach import input_reach
from otad.certify.lipschitz_map import Lipschitz
from otad.certify.rules import Batch
from otad.cip.surrogate import leave_one_out
from otad.io.mapped_rows import in_file, remember
from otad.io.tensor_files import fingerprint
from otad.model.answerers import distances_to
from otad.model.defend import defend
from otad.model.imitation import imitate, lessons
from otad.model.loading import load
from otad.model.otad import OTAD
from otad.nets import LipschitzMetric, fc_resnet

X, _ = images(8, seed=5)
HALF = {"bank_dtype": torch.float16}


def blank(model: OTAD, folder: Path) -> OTAD:
    """The same model, saved and loaded, with zeros where its map was."""
    model.save(folder)
    mapped = load(folder, resident=False)
    (path,) = folder.glob("bank-*.safetensors")
    for name in ("inputs", "features"):
        zeros = torch.zeros_like(getattr(mapped, f"bank_{name}"))
        remember(path, {name: zeros})
        assert in_file(zeros) is not None
        setattr(mapped, f"bank_{name}", zeros)
    return mapped


def lipschitz_metric() -> LipschitzMetric:
    return LipschitzMetric(SHAPE, widths=(8, 8), depth=1, key_dim=6, bounds=(0.0, 1.0))


@pytest.mark.parametrize("metric", [None, lipschitz_metric()])
def test_certificates_are_the_same(tmp_path: Path, metric: LipschitzMetric | None) -> None:
    for options in ({}, {"strong_convexity": -0.5}, HALF):
        model = exact("fc", metric=metric, **options)
        found, expected = (certify(one, X) for one in (blank(model, tmp_path), model))
        assert torch.equal(found.radius, expected.radius)
        assert found.rules == expected.rules
        assert bool((expected.radius > 0).any())
    x, y = images()
    net = fc_resnet(SHAPE, 1, task="regression", blocks=2, seed=1, bounds=(0.0, 1.0), std=0.3)
    model = defend(net, x, y.float(), n_neighbors=K, metric=metric)
    found, expected = (certify_values(one, X, eps=1e-3) for one in (blank(model, tmp_path), model))
    assert torch.equal(found.low, expected.low)
    assert torch.equal(found.high, expected.high)
    assert bool((expected.low.isfinite() & expected.high.isfinite()).all())


def test_neighbors_by_keys_are_as_far_away_in_the_embedded_space(tmp_path: Path) -> None:
    model = exact("fc", metric=lipschitz_metric(), strong_convexity=-0.5)
    found, expected = (
        steady_map(one, Batch(reach, X), reach.votes)
        for one in (blank(model, tmp_path), model)
        for reach in [input_reach(one, None, None, None)]
    )
    assert torch.equal(found.reach, expected.reach)
    assert torch.equal(found.size, expected.size)


def test_support_and_longest_points_of_a_global_map_are_the_same(tmp_path: Path) -> None:
    model = exact("fc", scope="global")
    hidden, query = blank(model, tmp_path), model.backbone.embed(X)
    with torch.no_grad():
        expected = model.solve(query).neighbors
        found = distances_to(query, hidden.bank_inputs, expected.indices)
    assert torch.equal(found, expected.distances)
    found, expected = (Lipschitz(input_reach(one, None, None, None)) for one in (hidden, model))
    assert (found.inputs, found.features) == (expected.inputs, expected.features) > (0, 0)


@pytest.mark.parametrize("options", [{}, HALF])
@pytest.mark.parametrize("rows", [None, torch.tensor([7, 0, 30])])
def test_lessons_and_what_is_learned_are_the_same(
    tmp_path: Path, options: dict[str, Any], rows: Tensor | None
) -> None:
    """From the teacher and from the bank's own features."""
    model = exact("fc", **options)
    hidden = blank(model, tmp_path)
    found, expected = (lessons(one, rows) for one in (hidden, model))
    assert torch.equal(found.indices, expected.indices)
    if found.query is not hidden.bank_inputs:  # which is in the file
        assert torch.equal(found.query, expected.query)
    found, expected = (
        leave_one_out(one.bank_inputs, one.bank_features, K, 2.0, rows=rows)
        for one in (hidden, model)
    )
    assert torch.equal(found.query, expected.query)
    assert torch.equal(found.indices, expected.indices)
    found, expected = (
        imitate(one, BRIEF, net=small_net(one), alpha=0.5, held_out=0 if rows is None else 4)
        for one in (hidden, model)
    )
    assert found.result.history[-1].loss == expected.result.history[-1].loss
    states = (one.model.solver.state_dict() for one in (found, expected))
    assert len({fingerprint(state) for state in states}) == 1
