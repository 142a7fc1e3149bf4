"""Learning the map from inputs to features, and keeping it."""

from otad.transport.history import EpochRecord, TrainResult
from otad.transport.metric_config import MetricConfig
from otad.transport.metric_training import train_metric
from otad.transport.parts import Split
from otad.transport.recipe import TrainConfig
from otad.transport.recipes import RECIPES, recipe
from otad.transport.training import train

__all__ = [
    "RECIPES",
    "EpochRecord",
    "MetricConfig",
    "Split",
    "TrainConfig",
    "TrainResult",
    "recipe",
    "train",
    "train_metric",
]
