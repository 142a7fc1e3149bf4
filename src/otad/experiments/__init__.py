"""Experiments: a TOML file in, a JSON record out, and published results beside ours in tables."""

from otad.arguments import guard
from otad.experiments.experiment import names
from otad.experiments.records import RunRecord
from otad.experiments.run import reproduce, reproduce_together
from otad.experiments.tables import write_page

__all__ = ["RunRecord", "names", "reproduce", "reproduce_together", "write_page"]

guard(globals(), __all__)
