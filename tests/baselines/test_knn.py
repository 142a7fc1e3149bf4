"""The k-NN baselines against scikit-learn, and their tie rule against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from torch import Tensor

from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.errors import InputError
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

DIM, CLASSES = 6, 4


Points = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def points() -> Points:
    generator = torch.Generator().manual_seed(1)
    x, query = (torch.randn(count, DIM, generator=generator) for count in (200, 150))
    y = torch.randint(CLASSES, (200,), generator=generator)
    return x, y, query


@pytest.fixture(scope="module")
def model(points: Points) -> OTAD:
    x, y, _ = points
    net = fc_resnet((DIM,), CLASSES, blocks=2, mean=0.3, std=2.0)
    return defend(net, x, y, n_neighbors=5)


@pytest.mark.parametrize("count", [1, 4, 5, 15])
def test_majority_agrees_with_scikit_learn_where_there_is_no_tie(
    model: OTAD, points: Points, count: int
) -> None:
    x, y, query = points
    theirs = KNeighborsClassifier(count).fit(x.numpy(), y.numpy())
    shares = theirs.predict_proba(query.numpy())
    scores = MajorityKnn(model, count)(query)
    np.testing.assert_array_equal(scores.floor().numpy(), np.round(count * shares))
    ordered = np.sort(shares, axis=1)
    single = ordered[:, -1] > ordered[:, -2]
    assert single.sum() > 30
    ours = scores.argmax(1).numpy()
    np.testing.assert_array_equal(ours[single], theirs.predict(query.numpy())[single])


@pytest.mark.parametrize("count", [2, 4, 6])
def test_ties_go_to_the_class_of_the_nearest(model: OTAD, points: Points, count: int) -> None:
    x, y, query = points
    nearest = torch.cdist(query.double(), x.double()).topk(count, largest=False).indices
    labels = y[nearest].tolist()
    # `max` takes the first of equals, and neighbors come nearest first
    expected = [max(row, key=row.count) for row in labels]
    ties = sum(
        sorted(map(row.count, set(row)))[-2:-1] == [max(map(row.count, row))] for row in labels
    )
    assert ties > 10
    assert MajorityKnn(model, count)(query).argmax(1).tolist() == expected


def test_mean_feature_is_read_by_the_same_head(model: OTAD, points: Points) -> None:
    """Nearest points by scikit-learn; features by the net itself, in one pass."""
    x, y, query = points
    theirs = KNeighborsClassifier(7).fit(x.numpy(), y.numpy())
    indices = torch.from_numpy(theirs.kneighbors(query.numpy(), return_distance=False))
    with torch.no_grad():
        features = model.backbone.transport(model.backbone.embed(x))[0]
        expected = model.backbone.head(features[indices].mean(1))
    torch.testing.assert_close(MeanFeatureKnn(model, 7)(query), expected)
    single = defend(model.backbone, x, y, n_neighbors=1)
    torch.testing.assert_close(MeanFeatureKnn(single)(query), single(query))
    half = defend(model.backbone, x, y, n_neighbors=7, bank_dtype=torch.float16)
    torch.testing.assert_close(MeanFeatureKnn(half)(query), expected, rtol=0.05, atol=0.02)


def test_regression(points: Points) -> None:
    x, _, query = points
    target = x.sum(1)
    model = defend(fc_resnet((DIM,), 1, task="regression"), x, target, n_neighbors=3)
    theirs = KNeighborsRegressor(3).fit(x.numpy(), target.numpy()).predict(query.numpy())
    np.testing.assert_allclose(MajorityKnn(model)(query).numpy(), theirs, rtol=1e-5, atol=1e-6)
    assert MeanFeatureKnn(model)(query).shape == (len(query),)


def test_refusals(model: OTAD, points: Points) -> None:
    for count, message in ((201, "at most the 200 points"), (0, "n_neighbors")):
        with pytest.raises(InputError, match=message):
            MajorityKnn(model, count)
    with pytest.raises(InputError, match="expected shape"):
        MajorityKnn(model)(points[2][:, 1:])
