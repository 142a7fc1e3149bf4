"""The kernels compile for a GPU, which their interpretation does not show."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

TYPES = {"indices": "*i64", "status": "*i64", "takes_part": "*i8", "outcome": "*i32"}
TYPES |= dict.fromkeys(("smoothness", "convexity", "steps", "numbers", "sensitivity"), "*fp64")
TYPES["potentials"] = "*fp64"
TYPES |= dict.fromkeys(("inputs", "features", "points"), "*fp16")
COUNTS = "batches batch segments sensitive size dim length"
TYPES |= dict.fromkeys(COUNTS.split(), "i32")
SEARCH = TYPES | dict.fromkeys(("places", "chosen", "exclude"), "*i64") | {"order": "*i32"}
SEARCH |= dict.fromkeys(("squares", "values", "lengths", "distances", "beyond"), "*fp64")
SEARCH |= dict.fromkeys(("count", "groups"), "i32")
KERNELS = "pairs_kernel gram_kernel combine_kernel row_kernel row_kernel row_kernel square_kernel"
KERNELS += " rank_kernel project_kernel project_kernel"


def test_kernels_compile_for_a_gpu() -> None:
    pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == KERNELS.split()


def compile_for_a_gpu(
    kernel: Any, warps: int, known: dict[str, str] = TYPES, **constants: Any
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    types = {name: known.get(name, "*fp32") for name in names} | dict.fromkeys(
        constants, "constexpr"
    )
    values = {(names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(kernel, types, values)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert len(made.asm["cubin"]) > 1000
    sys.stdout.write(kernel.__name__ + "\n")


if __name__ == "__main__":
    from otad.attacks.kernels import project_kernel
    from otad.cip.kernels import gram, row
    from otad.cip.local.solver import STAGES
    from otad.search import kernels

    sizes = {"count": 3, "shifts": True}
    compile_for_a_gpu(gram.pairs_kernel, 1, **sizes, vector=4, stages=2)
    compile_for_a_gpu(gram.gram_kernel, 2, **sizes, padded=16, width=32, stages=3)
    compile_for_a_gpu(gram.combine_kernel, 2, count=3, width=512)
    rules = {"climbs": False, "consistent": True, "rule": "canonical"}
    for count, padded in ((3, 16), (20, 32)):
        sizes = {"count": count, "total": count, "padded": padded, "shifts": False}
        for stage, warps, _ in STAGES[padded]:
            compile_for_a_gpu(row.row_kernel, warps, **sizes, **rules, stage=stage)
    sizes = {"size": 16, "width": 32, "halvings": 5, "at_once": 16}
    compile_for_a_gpu(kernels.square_kernel, 4, SEARCH, **sizes)
    compile_for_a_gpu(kernels.rank_kernel, 4, SEARCH, k=3, size=16)
    sizes = {"fillings": 8, "halvings": 22, "width": 1024}
    for norm in ("l2", "linf"):
        compile_for_a_gpu(project_kernel, 4, **sizes, norm=norm, bounded=True)
