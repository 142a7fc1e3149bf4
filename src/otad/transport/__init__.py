"""Learning the map from inputs to features, and keeping it."""

from otad.transport.history import EpochRecord, TrainResult
from otad.transport.recipe import TrainConfig
from otad.transport.training import Split, train

__all__ = ["EpochRecord", "Split", "TrainConfig", "TrainResult", "train"]
