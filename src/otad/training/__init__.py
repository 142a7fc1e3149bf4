"""Training of backbones and metrics, with checkpoints to resume from."""

from otad.arguments import guard
from otad.training.adversary import Adversary
from otad.training.backbone import train
from otad.training.backbone_config import TrainConfig
from otad.training.metric import MetricConfig, train_metric
from otad.training.recipes import RECIPES, fit_backbone, make_backbone, recipe
from otad.training.supervised import EpochRecord, Split, TrainResult

__all__ = [
    "RECIPES", "Adversary", "EpochRecord", "MetricConfig", "Split", "TrainConfig", "TrainResult",
    "fit_backbone", "make_backbone", "recipe", "train", "train_metric",
]  # fmt: skip

guard(globals(), __all__)
