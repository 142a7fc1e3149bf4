"""Published results and ours beside them: a TOML file in, a JSON record out, one page of tables.

otad.experiments.reproduce("mnist", data_dir=..., device="cuda", out="results", progress=True)
otad.experiments.reproduce_together(["cifar10", "cifar10_nn"], jobs=6, device="cuda")
otad.experiments.write_page("results", "docs/results.md")
"""

from otad.experiments.experiment import names
from otad.experiments.records import RunRecord
from otad.experiments.run import reproduce, reproduce_together
from otad.experiments.tables import write_page

__all__ = ["RunRecord", "names", "reproduce", "reproduce_together", "write_page"]
