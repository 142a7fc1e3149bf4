"""Certified radii: distances within which no attack, known or unknown, changes a prediction."""

from otad.arguments import guard
from otad.certify.attention import (
    activation_lipschitz,
    attention_lipschitz,
    layer_norm_bound,
    layer_norm_lipschitz,
    mlp_lipschitz,
    vit_block_lipschitz,
)
from otad.certify.certificate import Certificate, Interval
from otad.certify.certification import certify, certify_values

__all__ = [
    "Certificate", "Interval", "activation_lipschitz", "attention_lipschitz", "certify",
    "certify_values", "layer_norm_bound", "layer_norm_lipschitz", "mlp_lipschitz",
    "vit_block_lipschitz",
]  # fmt: skip

guard(globals(), __all__)
