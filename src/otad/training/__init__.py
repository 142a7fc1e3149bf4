"""Learning the map from inputs to features, and keeping it."""

from otad.training.history import EpochRecord, TrainResult
from otad.training.metric_config import MetricConfig
from otad.training.metric_training import train_metric
from otad.training.recipe import TrainConfig
from otad.training.recipes import RECIPES, recipe
from otad.training.train_split import Split
from otad.training.training import train

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
