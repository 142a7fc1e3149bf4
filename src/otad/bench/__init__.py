"""Benchmarks: the same instances for every solver, speed compared at equal answers."""
