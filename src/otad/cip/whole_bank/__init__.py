"""The global map, the gradient of one potential through all points of a bank."""
