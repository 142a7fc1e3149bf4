"""The names users may rely on, and what importing them does: nothing."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import textwrap

import pytest

# Adding a name here is a promise; removing one breaks somebody's program.
PUBLIC = {
    "otad": [
        "Certificate",
        "InputError",
        "Interval",
        "L2",
        "Linf",
        "LpBall",
        "OTAD",
        "OTADClassifier",
        "OTADRegressor",
        "OtadError",
        "Trace",
        "__version__",
        "attacks",
        "certify",
        "certify_values",
        "cip",
        "data",
        "defend",
        "evaluate",
        "load",
        "nets",
        "prototypes",
    ],
    "otad.attacks": [
        "ATTACKS",
        "Apgd",
        "Attack",
        "AttackResult",
        "AutoAttackSuite",
        "Bpda",
        "Knowledge",
        "L2",
        "Linf",
        "LpBall",
        "MetricAttack",
        "Needs",
        "NgOpt",
        "Pgd",
        "Pixle",
        "RandomNoise",
        "RandomSearch",
        "Square",
        "Transfer",
        "register_attack",
    ],
    "otad.certify": [
        "Certificate",
        "Interval",
        "activation_lipschitz",
        "attention_lipschitz",
        "certify",
        "certify_values",
        "layer_norm_bound",
        "layer_norm_lipschitz",
        "mlp_lipschitz",
        "vit_block_lipschitz",
    ],
    "otad.cip": [
        "BankProblem",
        "CipProblem",
        "CipSolution",
        "CvxpyCip",
        "ExactCip",
        "Status",
        "least_smoothness",
    ],
    "otad.evaluate": [
        "ATTACKS",
        "AttackRecord",
        "CertificateRecord",
        "Evaluation",
        "Flag",
        "PRESETS",
        "SolverRecord",
        "evaluate",
        "make_attack",
    ],
    "otad.explain": [
        "Explanation",
        "Neighbor",
        "explain",
    ],
}

# Packages that take long to load or come with an extra: imported where they are used.
HEAVY = (
    "anndata",
    "art",
    "cvxpy",
    "faiss",
    "foolbox",
    "matplotlib",
    "nevergrad",
    "ot",
    "pandas",
    "proxsuite",
    "pyautoattack",
    "scanpy",
    "sklearn",
    "torchvision",
)


def public_callables() -> list[tuple[str, str]]:
    """The promised names that own a docstring: all but plain values."""
    return [
        (module, name)
        for module, names in PUBLIC.items()
        for name in names
        if not name.startswith("__")
    ]


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_the_promised_ones(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == sorted(PUBLIC[module])


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(loaded, name)] == []


@pytest.mark.parametrize(("module", "name"), public_callables())
def test_public_names_are_documented(module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    own = thing.__doc__ or ""
    generated = inspect.isclass(thing) and own.startswith(f"{name}(")  # a dataclass's default
    assert own.strip(), f"{module}.{name} has no docstring"
    assert not generated, f"{module}.{name} has no docstring of its own"


@pytest.mark.parametrize(
    "first",
    [
        "import otad",
        "import otad.evaluate.suite; from otad.certify import hull",
    ],
)
def test_functions_that_share_their_name_with_a_package(first: str) -> None:
    """Whatever was imported before, `otad.evaluate` and `otad.certify` are the functions."""
    program = f"""
        {first}
        import otad
        from otad.certify import Certificate, certify
        from otad.evaluate import Evaluation, evaluate
        import otad.evaluate.records, otad.certify.certificate
        assert otad.evaluate is evaluate, otad.evaluate
        assert otad.certify is certify, otad.certify
        assert otad.Certificate is Certificate
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_is_silent_and_light() -> None:
    """In a fresh process: nothing printed, no global state of torch changed, nothing heavy."""
    program = f"""
        import sys
        import torch

        def state():
            return (
                torch.get_default_dtype(),
                torch.is_grad_enabled(),
                torch.get_num_threads(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
                torch.initial_seed(),
                torch.get_rng_state().tolist(),
            )

        def heavy():
            return {{name for name in {HEAVY!r} if name in sys.modules}}

        torch.manual_seed(7)
        before, loaded = state(), heavy()
        import otad
        import otad.cip
        assert state() == before, "importing otad changed torch's global state"
        assert heavy() == loaded, f"importing otad imported {{heavy() - loaded}}"
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
