"""Experiments: a TOML file in, a JSON record out, and published results beside ours in tables."""

from otad.arguments import guard
from otad.experiments.experiment import names
from otad.experiments.listing import ExperimentInfo, list_experiments
from otad.experiments.pages import write_pages
from otad.experiments.records import RunRecord
from otad.experiments.run import reproduce, reproduce_together

__all__ = [
    "ExperimentInfo",
    "RunRecord",
    "list_experiments",
    "names",
    "reproduce",
    "reproduce_together",
    "write_pages",
]

guard(globals(), __all__)
