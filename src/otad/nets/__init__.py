"""Backbones and metrics, and adapters for your own modules."""

from otad.arguments import guard
from otad.nets.adapt import SequentialBackbone, adapt, only_normalizes
from otad.nets.base import (
    Backbone,
    LinearHead,
    LipschitzBound,
    Metric,
    build,
    build_metric,
    register,
    register_metric,
)  # fmt: skip
from otad.nets.classifier_metric import metric_of
from otad.nets.files import load_net, save_net
from otad.nets.fully_connected import FCResNet, LiftedNet, fc_resnet, lifted_net, plain_net
from otad.nets.lift import Lift, feature_lift
from otad.nets.linf_dist import LinfDistNet
from otad.nets.lipschitz import LipschitzMetric
from otad.nets.metric_nets import AttentionMetric, CNNMetric, ResNetMetric, ViTMetric
from otad.nets.orthogonal import OrthogonalNet
from otad.nets.pretrained import PretrainedMetric, register_features
from otad.nets.resnet import ResNet
from otad.nets.soc import SOCNet
from otad.nets.vit import VisionTransformer, vision_transformer

__all__ = [
    "AttentionMetric", "Backbone", "CNNMetric", "FCResNet", "Lift", "LiftedNet", "LinearHead",
    "LinfDistNet", "LipschitzBound", "LipschitzMetric", "Metric", "OrthogonalNet",
    "PretrainedMetric", "ResNet", "ResNetMetric", "SOCNet", "SequentialBackbone", "ViTMetric",
    "VisionTransformer", "adapt", "build", "build_metric", "fc_resnet", "feature_lift",
    "lifted_net", "load_net", "metric_of", "only_normalizes", "plain_net", "register",
    "register_features", "register_metric", "save_net", "vision_transformer",
]  # fmt: skip

guard(globals(), __all__)
