"""The names users may rely on, and what importing them does: nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap

import pytest


def run(program: str) -> None:
    """In a fresh process, with warnings as errors; nothing may be printed."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_loads_nothing_else() -> None:
    run(
        """
        import sys
        import otad
        from otad.cli.main import main
        heavy = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "PIL")
        assert not [name for name in heavy if name in sys.modules]
        assert "OTADClassifier" in dir(otad)
        """
    )


def test_load_knows_every_kind_of_network() -> None:
    """A model saved by another process is loaded without an import of its kind of network."""
    run(
        """
        import importlib, pkgutil
        import otad
        otad.load
        from otad.nets import Backbone
        known = set(Backbone.family._kinds)
        import otad.model, otad.nets
        for package in (otad.model, otad.nets):
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                importlib.import_module(module.name)
        assert "prototype_net" in known and set(Backbone.family._kinds) == known
        """
    )


def test_imports_leave_torch_as_it_was_and_names_are_functions_in_any_order() -> None:
    """No extra is loaded. Whatever was imported before, `otad.evaluate`, `otad.certify` and
    `otad.explain`, which share their names with packages, are functions."""
    run(
        """
        import sys, torch

        def state():
            numbers = torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state().tolist()
            flags = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
            return numbers, flags, torch.get_default_dtype(), torch.get_float32_matmul_precision()

        torch.manual_seed(7)
        before, loaded = state(), set(sys.modules)
        import otad
        otad.defend, otad.certify, otad.evaluate, otad.cip
        for net in (otad.nets.fc_resnet, otad.nets.ResNet, otad.nets.SOCNet):
            net((1, 8, 8), 2)
        assert state() == before
        heavy = {"anndata", "art", "cvxpy", "faiss", "foolbox", "matplotlib", "nevergrad", "ot",
                 "pandas", "proxsuite", "pyautoattack", "sklearn", "sympy"}
        assert not heavy & (set(sys.modules) - loaded)

        for first in (
            "import otad; otad.certify, otad.evaluate, otad.explain",
            "import otad.evaluate.suite; from otad.certify import hull",
            "from otad import evaluate, certify",
            "from otad.evaluate import evaluate; from otad.certify import certify",
        ):
            for name in [name for name in sys.modules if name.partition(".")[0] == "otad"]:
                del sys.modules[name]
            exec(first)
            import otad
            from otad.certify import Certificate, certify
            from otad.explain import Explanation, explain
            from otad.evaluate import Evaluation, evaluate
            import otad.evaluate.records, otad.certify.votes
            assert otad.evaluate is evaluate, (first, otad.evaluate)
            assert otad.certify is certify, (first, otad.certify)
            assert otad.explain is explain, (first, otad.explain)
            assert otad.Certificate is Certificate
        """
    )


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="'otad' has no attribute 'nothing'"):
        importlib.import_module("otad").__getattr__("nothing")
