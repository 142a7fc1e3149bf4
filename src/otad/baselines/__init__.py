"""What OTAD is compared with: k-NN on the same bank, adversarial training, and purification."""

from otad.arguments import guard
from otad.baselines.adversarial import adversarial_training
from otad.baselines.generative import ApeGan, Diffusion
from otad.baselines.image_filters import MedianFilter, SparseCoding
from otad.baselines.knn import Knn as Knn
from otad.baselines.knn import MajorityKnn, MeanFeatureKnn
from otad.baselines.purification import Purified, Purifier, register_purifier
from otad.baselines.purifier_training import train_purifier

__all__ = [
    "ApeGan", "Diffusion", "MajorityKnn", "MeanFeatureKnn", "MedianFilter", "Purified", "Purifier",
    "SparseCoding", "adversarial_training", "register_purifier", "train_purifier",
]  # fmt: skip

guard(globals(), __all__)
