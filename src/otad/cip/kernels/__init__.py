"""Triton kernels of the solver; importing them needs Triton."""
