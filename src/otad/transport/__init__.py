"""Learning the map from inputs to features, and keeping it."""

from otad.transport.history import EpochRecord, TrainResult
from otad.transport.metric_config import MetricConfig
from otad.transport.metric_training import train_metric
from otad.transport.recipe import TrainConfig
from otad.transport.training import Split, train

__all__ = [
    "EpochRecord",
    "MetricConfig",
    "Split",
    "TrainConfig",
    "TrainResult",
    "train",
    "train_metric",
]
