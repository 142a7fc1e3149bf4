"""Compiled code of the solver: `cpu` needs Numba, all others need Triton."""
