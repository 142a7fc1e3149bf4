"""Bad calls of every public name: good arguments by one table, of which one or two are made odd."""

from __future__ import annotations

import importlib
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import torch
from cli.small import write_image
from experiments.toml_files import WINE, written
from factories import exact, images, model, net, points, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import otad
from otad import attacks, cip, data, training
from otad.arguments import hints_of
from otad.cip.surrogate import CipNet, CipNetConfig
from otad.estimators import OTADClassifier, OTADRegressor
from otad.io.environment import Environment

PACKAGES = ("", ".attacks", ".attacks.adaptive", ".baselines", ".certify", ".cip", ".cip.surrogate",
            ".data", ".evaluate", ".experiments", ".explain", ".model.prototypes", ".nets",
            ".training")  # fmt: skip
SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def nothing(*_: object) -> None: ...


class Calls:
    """Good values of a parameter by name, else by type; odd ones by type, or any at all."""

    def __init__(self, folder: Path) -> None:
        made, valued, x, anchors = model(), model(task="regression"), points(9), points(12)
        y, anchors, vit = (3 * x[:, 0]).long(), anchors.view(4, 3, 5), exact()
        (folder / "table.csv").write_text("a,b,c\n" + "1,2,u\n3,4,v\n" * 9)
        np.savez(folder / "arrays.npz", x=x.numpy(), y=y.numpy())
        (folder / "broken.csv").write_bytes(b'a,b,c\n1,"2\n\xff\0,,,,\n')
        (folder / "broken.npz").write_bytes(b"PK\3\4 not an archive")
        wine, path = written(folder, WINE, name="wine"), folder / "pictures"
        for place in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
            write_image(path / place, np.eye(8))
        made.save(folder / "model")
        problem, ball = cip.CipProblem(x[:4], anchors, anchors / 2, 2.0), otad.L2(0.3)
        kept = data.Dataset("some", x, y, x, y, "classification", "made", ("a", "b", "c"))
        line, lifted = nn.Linear(5, 3), otad.nets.lifted_net((5,), 3)
        scaling = data.Standardizer(x.mean(0), x.std(0))
        # fmt: off
        self.named: dict[str, list[Any]] = {
            "X": [x.numpy()], "anchors": [anchors], "attack": [attacks.Pgd, "pgd"],
            "attacks": [("pgd",)], "bank": [made.bank], "blocks": [1, [nn.Linear(5, 5)]],
            "classes": [tuple("abc")], "config": [net().config(), vit.metric.config()],
            "data": [(x, y), images()], "x": [x], "model": [made, valued],
            "device": ["cpu"], "dim": [5], "environment": [Environment.now(torch.device("cpu"), 1)],
            "epochs": [1], "first": [points(7)], "folder": [folder / "model", path, path / "a"],
            "genes": [tuple("abcd")], "hidden": [None, 4], "images": [anchors / 2],
            "in_weight": [points(15)], "indices": [torch.tensor([[0, 1]] * 4)], "key_dim": [4],
            "input_shape": [(5,), (1, 8, 8)], "kind": ["fc_resnet", "prediction"], "label": ["c"],
            "labels": [y], "mean": [x[0]], "metric": [None, vit.metric], "n_neighbors": [2],
            "n_outputs": [3], "name": ["pgd", "wine", "digits", "gelu", "fc", wine],
            "names": [[wine]], "needed": [("x",)], "out": [folder / "results"],
            "out_weight": [points(5)], "patch": [4], "path": [folder / "table.csv",
            folder / "arrays.npz"], "paths": [[path / "a" / "0.png"]], "prediction": [y],
            "problem": [problem], "problems": [problem], "query": [x[:4]], "root": [path],
            "second": [points(5, dim=7)], "seed": [0], "shape": [(5,)], "source": [net()],
            "std": [x[0] + 1], "steps": [1], "target": ["c"], "targets": [y], "test_y": [y],
            "train_y": [y], "weight": [x[0]], "widths": [(4, 4)], "y": [y],
        }
        tensors = [x, x.double(), y, x[0], x[:0], x[0, 0], x * math.nan, x * 1e38, x / 0, x.half(),
                   x.bool(), x.to(torch.complex64), x.T, images()[0], x.clone().requires_grad_(),
                   y.int(), -y, 10**6 * y, x[:, :0], x.to("meta"), x.to_sparse()]
        arrays = [np.zeros(0), np.array(["a", None]), np.array({}), y.numpy(),
                  x.double().numpy() * 1e300]
        texts = ["", "nothing", "\0", "\x1b[31mred", "é" * 300, "cuda:7", "[b]", "../x", "-1", "1"]
        paths = [folder / "none", folder, folder / "broken.csv", folder / "broken.npz", Path("\0"),
                 Path("/dev/null"), Path("a" * 300), folder / "table.csv" / "inside"]
        self.typed: dict[Any, tuple[list[Any], list[Any]]] = {  # good ones and odd ones
            int: ([1, 2], [-1, 0, 1, 2**40, 2**63, -(10**30), 10**400]), str: (["gelu"], texts),
            float: ([0.5, 1.0], [-1.0, 0.0, 1e-300, 1e300, math.nan, math.inf, -math.inf]),
            bool: ([True, False], [1, "no"]), Tensor: ([x], tensors), type(None): ([None], [0]),
            Path: ([folder / "new"], paths), Any: ([None], [object()]), Callable: ([nothing], []),
            nn.Module: ([net()], [nn.Linear(5, 3), nn.Identity(), net().train(), nn.Module()]),
            torch.dtype: ([torch.float16], [torch.int64, torch.complex64, torch.bool]),
            torch.Generator: ([torch.Generator()], []), np.random.RandomState: ([7], [-1]),
            otad.OTAD: ([made, valued], [vit, model(scope="global")]), data.Dataset: ([kept], []),
            otad.LpBall: ([ball], [otad.Linf(0.0)]), attacks.Attack: ([attacks.Pgd(steps=1)], []),
            training.TrainConfig: ([training.TrainConfig(epochs=1)], []), nn.Linear: ([line], []),
            training.MetricConfig: ([training.MetricConfig(epochs=1)], []),
            CipNetConfig: ([CipNetConfig(epochs=1, warmup=0.0)], []),
            CipNet: ([small_net(model(n_neighbors=3))], []), otad.nets.Metric: ([vit.metric], []),
            otad.nets.Backbone: ([net()], [vit.backbone]), otad.nets.LiftedNet: ([lifted], []),
            data.Standardizer: ([scaling], []), cip.CipProblem: ([problem], []),
            cip.Status: ([cip.Status.SOLVED], []), Mapping: ([{}], [{1: 2}]),
            dict: ([{}], [{1: 2}, {"a": math.nan}, {"": []}]), np.ndarray: ([x.numpy()], arrays),
            DataLoader: ([DataLoader(TensorDataset(x, y))], [DataLoader([]), DataLoader([{}, 1])]),
        }
        self.any = [None, True, 3, -2.5, math.nan, 10**400, "text", b"bytes", [], {}, (1, "2"),
                    {1}, object(), nothing, 1j, x.numpy(), np.array([{}]), [x, None], x, Path()]
        methods = {made: "distance forward query_keys replace save solve trace", made.bank: "save",
                   cip.ExactCip(): "__call__", attacks.Pgd(steps=1): "__call__",
                   otad.certify(made, x): "accuracy", ball: "distance project"}
        # fmt: on
        modules = [importlib.import_module(f"otad{package}") for package in PACKAGES]
        found = {
            f"{module.__name__}.{name}": getattr(module, name)
            for module in modules
            for name in module.__all__
        }
        found |= {
            f"{type(one).__name__}.{name}": getattr(one, name)
            for one, names in methods.items()
            for name in names.split()
        }
        # fmt: on
        self.functions = [(name, one) for name, one in found.items() if _is_called(one)]

    def draw(self, rng: random.Random, number: int) -> tuple[str, str, Callable[[], Any]]:
        """A name, the call in words, and the call: most arguments good, some odd, now and then one
        missing or unknown."""
        called, function = self.functions[number % len(self.functions)]
        hints = hints_of(function.__init__ if inspect.isclass(function) else function)
        parameters = inspect.signature(function).parameters
        taken = [name for name, one in parameters.items() if one.kind not in SEVERAL]
        used = [name for name in taken if parameters[name].default is inspect.Parameter.empty]
        used += [name for name in taken if name not in used and rng.random() < 0.15]
        options = {name: self.value(rng, hints.get(name, Any), 0, name) for name in used}
        for name in rng.sample(taken, min(len(taken), rng.choice((1, 1, 1, 2)))):
            by_type = self.value(rng, hints.get(name, Any), 1)
            options[name] = by_type if rng.random() < 0.6 else rng.choice(self.any)
        if options and rng.random() < 0.02:
            options.pop(rng.choice(list(options)))
        if rng.random() < 0.02:
            options["unknown"] = 1
        text = ", ".join(f"{name}={' '.join(repr(options[name]).split())[:80]}" for name in options)
        return called, f"{called}({text})", lambda: _use(function, options)

    def value(self, rng: random.Random, hint: Any, odd: int, name: str = "") -> Any:
        kind, parts = get_origin(hint) or hint, get_args(hint)
        if named := [one for one in self.named.get(name, ()) if _may_be(one, hint)]:
            return rng.choice(named)
        if kind in (Union, UnionType):
            return self.value(rng, rng.choice(parts), odd)
        if kind is Literal:
            return "nothing" if odd else parts[0]
        if kind in (tuple, Sequence):
            count = len(parts) if Ellipsis not in parts and kind is tuple else rng.choice((2, 3))
            count -= odd * rng.choice((0, 1, 2))
            return tuple(self.value(rng, parts[0], odd) for _ in range(count))
        return rng.choice(self.typed.get(kind, self.typed[Any])[odd] or self.any)


def _is_called(one: Any) -> bool:
    """Exceptions, enumerations and what is abstract are not made by users."""
    unmade = inspect.isabstract(one) or getattr(one, "_is_protocol", False)
    made = inspect.isclass(one) and not unmade and not issubclass(one, (BaseException, Enum))
    return made or inspect.isroutine(one)


def _may_be(value: Any, hint: Any) -> bool:
    """Whether a named value may be meant: `blocks` is a number here and modules there."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [get_origin(part) or part for part in parts]
    plain = [kind for kind in kinds if isinstance(kind, type) and not hasattr(kind, "_is_protocol")]
    return len(plain) < len(kinds) or Any in plain or isinstance(value, tuple(plain))


def _use(function: Callable[..., Any], options: dict[str, Any]) -> None:
    made = function(**options)
    if isinstance(made, (OTADClassifier, OTADRegressor)):  # which check their options when fitted
        endless = isinstance(made.epochs, int) and made.epochs >= 30
        made.set_params(epochs=1 if endless else made.epochs)
        made.fit(points(9).numpy(), np.arange(9) % 3)
