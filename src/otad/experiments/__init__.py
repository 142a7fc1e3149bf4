"""Every published result and ours beside it: a TOML file in, a JSON record out, one page of tables.

otad.experiments.reproduce("mnist", data_dir=..., device="cuda", out="results", progress=True)
otad.experiments.write_page("results", "docs/results.md")
"""

from otad.experiments.config import names
from otad.experiments.records import RunRecord
from otad.experiments.run import reproduce
from otad.experiments.tables import write_page

__all__ = ["RunRecord", "names", "reproduce", "write_page"]
