"""Networks: embed an input, transport it to a feature of the same dimension, read it linearly."""

from otad.nets.adapt import SequentialBackbone, adapt
from otad.nets.base import Backbone, LinearHead, build, register
from otad.nets.resnet import FCResNet, fc_resnet, plain_net
from otad.nets.vit import VisionTransformer, vision_transformer

__all__ = [
    "Backbone",
    "FCResNet",
    "LinearHead",
    "SequentialBackbone",
    "VisionTransformer",
    "adapt",
    "build",
    "fc_resnet",
    "plain_net",
    "register",
    "vision_transformer",
]
