"""Compiled code of the solver: `cpu_products` and `cpu_row` need Numba, all others Triton."""
