"""Every wrong input is an `InputError` that names the argument, what was expected and what came."""

from __future__ import annotations

import re

import pytest
import torch

from otad.cip import BankProblem, CipProblem, ExactCip
from otad.cip.reference import CvxpyCip
from otad.errors import InputError, OtadError

B, K, D = 3, 4, 5


def dense(**changes: object) -> CipProblem:
    valid = {"query": ZEROS, "anchors": torch.rand(B, K, D), "images": torch.rand(B, K, D)}
    return CipProblem(**valid | {"smoothness": 2.0, "strong_convexity": 0.0} | changes)


def of_bank(**changes: object) -> BankProblem:
    valid = {"query": ZEROS, "inputs": torch.rand(9, D), "features": torch.rand(9, D)}
    valid["indices"] = torch.zeros(B, K, dtype=torch.int64)
    return BankProblem(**valid | {"smoothness": 2.0, "strong_convexity": 0.0} | changes)


def ending_with(value: float, *shape: int) -> torch.Tensor:
    tensor = torch.zeros(shape)
    tensor.view(-1)[-1] = value
    return tensor


META = torch.device("meta")
NAN, INF = float("nan"), float("inf")
GRAD = torch.rand(B, K, D, requires_grad=True)
ZEROS, BIG = torch.zeros(B, D), torch.zeros(B, K, D)
# One change of valid arguments, and what the error must name: the argument first.
DENSE = [
    ({"anchors": ending_with(INF, B, K, D)}, r"anchors: .*inf at \(2, 3, 4\)"),
    ({"images": ending_with(-INF, B, K, D)}, "images: .*-inf"),
    ({"query": [[0.0]]}, "query: .*list"),
    ({"query": torch.zeros(D)}, r"query: .*B,d.*\(5,\)"),
    ({"anchors": ZEROS}, r"anchors: .*B,K,d.*\(3, 5\)"),
    ({"query": ZEROS[:0], "anchors": BIG[:0]}, r"query: .*along B.*\(0, 5\)"),
    ({"anchors": BIG[:, :0]}, "anchors: .*along K"),
    ({"query": ZEROS[:, :0]}, r"query: .*along d.*\(3, 0\)"),
    ({"anchors": BIG[:2]}, r"anchors: .*\(3, 4, 5\).*\(2, 4, 5\)"),
    ({"anchors": torch.zeros(B, K, 6)}, r"anchors: .*\(3, 4, 5\).*\(3, 4, 6\)"),
    ({"images": BIG[:, :2]}, r"images: .*\(3, 4, 5\).*\(3, 2, 5\)"),
    ({"query": ZEROS.long()}, "query: .*float32 or float64.*int64"),
    ({"images": BIG.half()}, "images: .*float32 or float64.*float16"),
    ({"anchors": BIG.double()}, "anchors: .*float32.*float64"),
    ({"anchors": BIG.to(META)}, "anchors: .*cpu.*meta"),
    ({"images": BIG.to(META)}, "images: .*cpu.*meta"),
    ({"smoothness": torch.ones(B, device=META)}, "smoothness: .*cpu.*meta"),
    ({"anchors": GRAD}, "anchors: .*grad"),
    ({"images": GRAD}, "images: .*grad"),
]
EITHER = [
    ({"query": ending_with(NAN, B, D)}, r"query: .*nan at \(2, 4\)"),
    ({"query": ZEROS.half()}, "query: .*float32 or float64.*float16"),
    ({"smoothness": 0.0, "strong_convexity": -1.0}, "smoothness: .*above 0.* 0.0 "),
    ({"smoothness": -2.0, "strong_convexity": -3.0}, "smoothness: .*above 0.* -2.0 "),
    ({"smoothness": 0.5, "strong_convexity": 0.5}, "smoothness: .*0.5.*0.5 in row 0"),
    ({"strong_convexity": torch.tensor([0.0, 2.5, 0.0])}, "smoothness: .*2.0.*2.5 in row 1"),
    ({"smoothness": NAN}, "smoothness: .*nan"),
    ({"smoothness": INF}, "smoothness: .*inf"),
    ({"strong_convexity": -INF}, "strong_convexity: .*-inf"),
    ({"smoothness": "2"}, "smoothness: .*str"),
    ({"smoothness": True}, "smoothness: .*bool"),
    ({"smoothness": torch.ones(2)}, r"smoothness: .*\(3,\).*\(2,\)"),
    ({"smoothness": torch.ones(B, 1)}, r"smoothness: .*\(3, 1\)"),
    ({"strong_convexity": torch.zeros(B).long()}, "strong_convexity: .*int64"),
]
BANK = [
    ({"indices": torch.full((B, K), 9)}, "indices: .*0 to 8.* 9 to 9"),
    ({"indices": torch.tensor([[0], [-1], [2]])}, "indices: .*0 to 8.*-1"),
    ({"indices": torch.zeros(B, K)}, "indices: .*int64.*float32"),
    ({"indices": torch.zeros(B, 0).long()}, "indices: .*along K"),
    ({"indices": torch.zeros(2, K).long()}, r"indices: .*\(3, 4\).*\(2, 4\)"),
    ({"inputs": torch.zeros(9, 6)}, r"inputs: .*\(9, 5\).*\(9, 6\)"),
    ({"inputs": torch.zeros(9, D).int()}, "inputs: .*float16.*int32"),
    ({"features": torch.zeros(8, D)}, r"features: .*\(9, 5\).*\(8, 5\)"),
    ({"features": torch.zeros(9, D).half()}, "features: .*float32.*float16"),
    ({"features": torch.zeros(9, D, device=META)}, "features: .*cpu.*meta"),
    ({"features": torch.zeros(9, D, requires_grad=True)}, "features: .*grad"),
]


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [*((dense, *case) for case in DENSE + EITHER), *((of_bank, *case) for case in BANK + EITHER)],
)
def test_problems(make, changes, message) -> None:
    with pytest.raises(InputError, match=f"^{message}") as caught:
        make(**changes)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OtadError)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("mode", ["exact"]),
        ("potential", ["mean"]),
        ("on_failure", ["skip"]),
        ("climb", [(0.0, 0.0), (-0.1, 0.2), (0.1,), 0.1, (0.1, INF), (NAN, 0.1), ("1", 0.1)]),
        ("max_smoothness", [0.0, NAN, INF]),
        ("spares", [-1, 1.5]),
        ("chunk", [0, True]),
    ],
)
def test_solver_options(option, values) -> None:
    for value in values:
        for solver in (ExactCip, CvxpyCip) if option in ("mode", "on_failure") else (ExactCip,):
            with pytest.raises(InputError, match=f"^{option}: .*{re.escape(repr(value))}"):
                solver(**{option: value})


def test_calls_and_frozen_fields() -> None:
    problem = dense()
    with pytest.raises(InputError, match=r"spares: .*4 neighbors.*4"):
        ExactCip(spares=4)(problem)
    with pytest.raises(InputError, match=r"max_smoothness: .*2.0.*1.5"):
        ExactCip(max_smoothness=1.5)(problem)
    other = dense(anchors=torch.rand(B, 2, D), images=torch.rand(B, 2, D))
    solution = ExactCip(on_failure="abstain")(problem)
    with pytest.raises(InputError, match=r"multipliers .*\(3, 2\).*\(3, 4\)"):
        other.residual(solution)

    for thing, name in ((problem, "query"), (solution, "image"), (ExactCip(), "mode")):
        with pytest.raises(AttributeError):
            setattr(thing, name, None)


def test_query_may_require_grad_and_constants_may_under_no_grad() -> None:
    assert dense(query=ZEROS.clone().requires_grad_()).query.requires_grad
    with torch.no_grad():
        dense(anchors=GRAD)
