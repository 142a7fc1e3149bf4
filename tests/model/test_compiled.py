"""Compiled and exported models answer like the models themselves, with the same gradients."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from factories import KINDS, estimated, model, points, queries, refuses
from torch import Tensor, nn

import otad
from otad.model import compiled


def of_own_net() -> otad.OTAD:
    """The model of a network that no class of this package made."""
    net, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), points()
    return otad.defend(net, x, (3 * x[:, 0]).long(), n_neighbors=3)


def compile_whole(made: otad.OTAD) -> torch.nn.Module:
    """Without a single graph break; with the operations as they are, to compare bit for bit."""
    torch._dynamo.reset()
    return torch.compile(made, fullgraph=True, backend="aot_eager")


def answer_and_slope(net: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    outputs = net(x)
    outputs.square().sum().backward()
    return outputs.detach(), x.grad


@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_model_compiles_as_one_graph(kind: str) -> None:
    made = KINDS[kind](0)
    x = queries(made)
    fast = compile_whole(made)
    for rows in (x, x[:7]):
        found, expected = answer_and_slope(fast, rows), answer_and_slope(made, rows)
        assert all(map(torch.equal, found, expected))


def test_what_a_compiled_model_may_not_forget() -> None:
    """A limit on the distance, a bank changed in place, wider numbers."""
    made = model(strong_convexity=-0.3)
    x = queries(made)
    made.abstain_beyond = float(made.distance(x).median())
    fast = compile_whole(made)
    torch.testing.assert_close(fast(x), made(x), equal_nan=True, rtol=0, atol=0)
    assert 0 < int(fast(x).isnan().any(1).sum()) < len(x)
    made.load_state_dict(model(1, strong_convexity=-0.3).state_dict())
    torch.testing.assert_close(fast(x), made(x), equal_nan=True, rtol=0, atol=0)
    made.double()
    torch.testing.assert_close(fast(x.double()), made(x.double()), equal_nan=True)
    with pytest.raises(Exception, match=r"inputs of shape \(5,\)"):
        fast(x[:, :4].double())
    assert len(compiled._rebuilt) <= compiled._MOST


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # within torch
@pytest.mark.parametrize("kind", ["half", "regression", "global", "metric", "surrogate", "own"])
def test_a_model_is_exported_with_its_bank(kind: str) -> None:
    own = {"surrogate": lambda: estimated("fc", blocks=1), "own": of_own_net}
    made = own[kind]() if kind in own else KINDS[kind](0)
    x, rows = queries(made), {"x": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(made, (x,), dynamic_shapes=rows)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x[:7]), made(x[:7]))
    used = {getattr(node.target, "namespace", None) for node in program.graph.nodes} - {None}
    # A CIP-net is made of torch's own operations, which other runtimes know too.
    assert used == ({"aten"} if kind == "surrogate" else {"aten", "otad"})


def test_onnx_cannot_hold_an_exact_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    refuses(torch.export.export, made, (queries(made),), match="CIP-net.*ONNX.*exact solver")


@pytest.mark.filterwarnings("ignore")  # of the exporter itself
def test_a_cip_net_runs_in_onnx(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the packages of ONNX are no part of any extra")
    import onnxruntime

    made, file = estimated("fc"), tmp_path / "model.onnx"
    x, rows = queries(made, 7), {"x": {0: torch.export.Dim("batch", min=2)}}
    torch.onnx.export(made, (x[:4],), file, dynamo=True, dynamic_shapes=rows, verbose=False)
    session = onnxruntime.InferenceSession(file)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), made(x).detach())


def test_solvers_without_a_description_are_refused() -> None:
    made = model()
    made.answerer.exact_solver = None  # as for a solver of the user's own
    refuses(torch.export.export, made, (queries(made),), match="solver: expected .*exported")
