"""What OTAD is compared with: k-NN on the same bank, and adversarial training."""

from otad.arguments import guard
from otad.baselines.adversarial import adversarial_training
from otad.baselines.knn import Knn as Knn
from otad.baselines.knn import MajorityKnn, MeanFeatureKnn

__all__ = ["MajorityKnn", "MeanFeatureKnn", "adversarial_training"]

guard(globals(), __all__)
