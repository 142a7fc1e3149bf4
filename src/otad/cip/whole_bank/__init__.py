"""The global map: one potential for all points of a bank."""
