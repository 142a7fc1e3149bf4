"""Every wrong input is an `InputError` that names what was expected and what came."""

from __future__ import annotations

import re

import pytest
import torch

from otad.cip import BankProblem, CipProblem, ExactCip
from otad.cip.reference import CvxpyCip
from otad.errors import InputError, OtadError

B, K, D = 3, 4, 5


def dense(**changes: object) -> dict[str, object]:
    valid = {
        "query": torch.zeros(B, D),
        "anchors": torch.rand(B, K, D),
        "images": torch.rand(B, K, D),
        "smoothness": 2.0,
        "strong_convexity": 0.0,
    }
    return valid | changes


def banked(**changes: object) -> dict[str, object]:
    valid = {
        "query": torch.zeros(B, D),
        "inputs": torch.rand(9, D),
        "features": torch.rand(9, D),
        "indices": torch.zeros(B, K, dtype=torch.int64),
        "smoothness": 2.0,
        "strong_convexity": 0.0,
    }
    return valid | changes


def spoiled(shape: tuple[int, ...], value: float) -> torch.Tensor:
    tensor = torch.zeros(shape)
    tensor.view(-1)[-1] = value
    return tensor


META = torch.device("meta")
NAN, INF = float("nan"), float("inf")
GRAD = torch.rand(B, K, D, requires_grad=True)
DENSE = [
    ({"query": spoiled((B, D), NAN)}, "query: expected finite values, got nan at (2, 4)"),
    ({"anchors": spoiled((B, K, D), INF)}, "anchors: expected finite values, got inf at (2, 3, 4)"),
    ({"images": spoiled((B, K, D), -INF)}, "images: expected finite values, got -inf"),
    ({"query": [[0.0]]}, "query: expected a torch.Tensor (B,d), got list"),
    ({"query": torch.zeros(D)}, "query: expected 2 axes (B,d), got shape (5,)"),
    ({"anchors": torch.zeros(B, D)}, "anchors: expected 3 axes (B,K,d), got shape (3, 5)"),
    (
        {"query": torch.zeros(0, D), "anchors": torch.zeros(0, K, D)},
        "query: expected at least one entry along B, got shape (0, 5)",
    ),
    ({"anchors": torch.zeros(B, 0, D)}, "anchors: expected at least one entry along K, got shape"),
    ({"query": torch.zeros(B, 0)}, "query: expected at least one entry along d, got shape (3, 0)"),
    (
        {"anchors": torch.zeros(2, K, D)},
        "anchors: expected shape (3, 4, 5) (B,K,d) to match query, got (2, 4, 5)",
    ),
    ({"anchors": torch.zeros(B, K, 6)}, "anchors: expected shape (3, 4, 5)"),
    (
        {"images": torch.zeros(B, 2, D)},
        "images: expected shape (3, 4, 5) to match anchors, got (3, 2, 5)",
    ),
    (
        {"query": torch.zeros(B, D, dtype=torch.int64)},
        "query: expected dtype float32 or float64, got int64",
    ),
    ({"images": torch.zeros(B, K, D).half()}, "images: expected dtype float32 or float64, got"),
    ({"query": torch.zeros(B, D).half()}, "query: expected dtype float32 or float64, got float16"),
    (
        {"anchors": torch.zeros(B, K, D).double()},
        "anchors: expected dtype float32 like query, got float64",
    ),
    (
        {"anchors": torch.zeros(B, K, D, device=META)},
        "anchors: expected device cpu like query, got meta",
    ),
    (
        {"images": torch.zeros(B, K, D, device=META)},
        "images: expected device cpu like query, got meta",
    ),
    (
        {"smoothness": torch.ones(B, device=META)},
        "smoothness: expected device cpu, got meta",
    ),
    ({"anchors": GRAD}, "anchors: expected a constant (gradients flow through query alone)"),
    ({"images": GRAD}, "images: expected a constant (gradients flow through query alone)"),
]
CURVATURE = [
    ({"smoothness": 0.0, "strong_convexity": -1.0}, "smoothness: expected a value above 0, got"),
    ({"smoothness": -2.0, "strong_convexity": -3.0}, "smoothness: expected a value above 0, got"),
    (
        {"smoothness": 0.5, "strong_convexity": 0.5},
        "smoothness: expected a value above strong_convexity, got smoothness 0.5 "
        "and strong_convexity 0.5 in row 0",
    ),
    (
        {"smoothness": torch.tensor([1.0, 0.2, 1.0]), "strong_convexity": 0.25},
        "and strong_convexity 0.25 in row 1",
    ),
    ({"smoothness": NAN}, "smoothness: expected finite values, got nan"),
    ({"smoothness": INF}, "smoothness: expected finite values, got inf"),
    ({"strong_convexity": -INF}, "strong_convexity: expected finite values, got -inf"),
    ({"smoothness": "2"}, "smoothness: expected a number or a tensor (B,), got str"),
    ({"smoothness": True}, "smoothness: expected a number or a tensor (B,), got bool"),
    (
        {"smoothness": torch.ones(2)},
        "smoothness: expected shape (3,) (one value per query) or a number, got (2,)",
    ),
    ({"smoothness": torch.ones(B, 1)}, "smoothness: expected 1 axes (B), got shape (3, 1)"),
    (
        {"strong_convexity": torch.zeros(B, dtype=torch.int64)},
        "strong_convexity: expected dtype float32 or float64, got int64",
    ),
]
BANK = [
    (
        {"indices": torch.full((B, K), 9)},
        "indices: expected bank rows 0 to 8, got 9 to 9",
    ),
    ({"indices": torch.tensor([[0], [-1], [2]])}, "indices: expected bank rows 0 to 8, got -1"),
    ({"indices": torch.zeros(B, K)}, "indices: expected dtype int64, got float32"),
    ({"indices": torch.zeros(B, 0).long()}, "indices: expected at least one entry along K"),
    ({"indices": torch.zeros(2, K).long()}, "indices: expected shape (3, 4) (B,K) to match query"),
    ({"inputs": torch.zeros(9, 6)}, "inputs: expected shape (9, 5) (N,d) to match query, got"),
    ({"inputs": torch.zeros(9, D).int()}, "inputs: expected dtype float16 or bfloat16 or float32"),
    ({"features": torch.zeros(8, D)}, "features: expected shape (9, 5) to match inputs, got"),
    ({"features": torch.zeros(9, D).half()}, "features: expected dtype float32 like inputs, got"),
    (
        {"features": torch.zeros(9, D, device=META)},
        "features: expected device cpu like inputs, got meta",
    ),
    (
        {"features": torch.zeros(9, D, requires_grad=True)},
        "features: expected a constant (gradients flow through query alone)",
    ),
    ({"query": spoiled((B, D), NAN)}, "query: expected finite values, got nan at (2, 4)"),
    ({"query": torch.zeros(B, D).half()}, "query: expected dtype float32 or float64, got float16"),
]


@pytest.mark.parametrize(("changes", "message"), [*DENSE, *CURVATURE])
def test_dense_problem(changes, message) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        CipProblem(**dense(**changes))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OtadError)


@pytest.mark.parametrize(("changes", "message"), [*BANK, *CURVATURE])
def test_bank_problem(changes, message) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        BankProblem(**banked(**changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "exact"}, "mode: expected one of consistent, paper, got 'exact'"),
        ({"potential": "mean"}, "potential: expected one of canonical, lowest, highest, got"),
        ({"on_failure": "skip"}, "on_failure: expected one of raise, abstain, fallback, got"),
        ({"climb": (0.0, 0.0)}, "climb: expected two finite steps (delta1, delta2) of at least 0"),
        ({"climb": (-0.1, 0.2)}, "not both 0, got (-0.1, 0.2)"),
        ({"climb": (0.1,)}, "climb: expected two finite steps"),
        ({"climb": 0.1}, "climb: expected two finite steps"),
        ({"climb": (0.1, INF)}, "climb: expected two finite steps"),
        ({"climb": (NAN, 0.1)}, "climb: expected two finite steps"),
        ({"climb": ("1", 0.1)}, "climb: expected two finite steps"),
        ({"max_smoothness": 0.0}, "max_smoothness: expected a positive number or None, got 0.0"),
        ({"max_smoothness": NAN}, "max_smoothness: expected a positive number or None, got nan"),
        ({"max_smoothness": INF}, "max_smoothness: expected a positive number or None, got inf"),
        ({"spares": -1}, "spares: expected an integer of at least 0, got -1"),
        ({"spares": 1.5}, "spares: expected an integer of at least 0, got 1.5"),
        ({"chunk": 0}, "chunk: expected an integer of at least 1, got 0"),
        ({"chunk": True}, "chunk: expected an integer of at least 1, got True"),
    ],
)
def test_solver_options(options, message) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        ExactCip(**options)


@pytest.mark.parametrize("options", [{"mode": "exact"}, {"on_failure": "skip"}])
def test_reference_options(options) -> None:
    with pytest.raises(InputError, match="expected one of"):
        CvxpyCip(**options)


def test_calls() -> None:
    problem = CipProblem(**dense())
    with pytest.raises(
        InputError, match=r"spares: expected fewer than the 4 neighbors of a row, got 4"
    ):
        ExactCip(spares=4)(problem)
    with pytest.raises(
        InputError, match=r"max_smoothness: expected at least the problem's smoothness 2.0, got 1.5"
    ):
        ExactCip(max_smoothness=1.5)(problem)
    other = CipProblem(**dense(anchors=torch.rand(B, 2, D), images=torch.rand(B, 2, D)))
    solution = ExactCip(on_failure="abstain")(problem)
    with pytest.raises(InputError, match=r"expected multipliers of shape \(3, 2\), got \(3, 4\)"):
        other.residual(solution)


def test_query_may_require_grad_and_constants_may_under_no_grad() -> None:
    query = torch.zeros(B, D, requires_grad=True)
    assert CipProblem(**dense(query=query)).query.requires_grad
    with torch.no_grad():
        CipProblem(**dense(anchors=GRAD))


def test_problems_and_solutions_are_frozen() -> None:
    problem = CipProblem(**dense())
    solution = ExactCip(on_failure="abstain")(problem)
    for thing, name in ((problem, "query"), (solution, "image"), (ExactCip(), "mode")):
        with pytest.raises(AttributeError):
            setattr(thing, name, None)
