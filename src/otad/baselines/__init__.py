"""What OTAD is compared with."""

from otad.baselines.knn import MajorityKnn, MeanFeatureKnn

__all__ = ["MajorityKnn", "MeanFeatureKnn"]
