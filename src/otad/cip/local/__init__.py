"""The solver for each query's own neighbors."""
