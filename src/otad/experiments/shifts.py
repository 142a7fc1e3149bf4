"""How far a step moves a regression, by the measures the paper takes from Gupta et al. 2021.

"An Adversarial Attacker for Neural Networks in Regression Problems" (CEUR workshop proceedings
2916). The OTAD paper prints no formulas; these are borne out by the figures of its undefended rows
(see the tests). With f the model, y_i the targets and x_i + d_i the moved inputs of n points, a_i =
|f(x_i + d_i) - y_i| and c_i = |f(x_i) - y_i|:

    E     = 1/n sum_i |f(x_i + d_i) - f(x_i)|
    SMAPE = 2/n sum_i |a_i - c_i| / (a_i + c_i)

so E is a distance between answers, and SMAPE, from 0 to 2, compares their errors, not the answers.
"""

from __future__ import annotations

from torch import Tensor

E, SMAPE = "E", "SMAPE"


def shifts(moved: Tensor, clean: Tensor, targets: Tensor) -> dict[str, float]:
    """E and SMAPE of answers (n,) at moved and at clean inputs."""
    return {E: mean_shift(moved, clean), SMAPE: smape(moved, clean, targets)}


def mean_shift(moved: Tensor, clean: Tensor) -> float:
    """E."""
    return float((moved.double() - clean.double()).abs().mean())


def smape(moved: Tensor, clean: Tensor, targets: Tensor) -> float:
    """SMAPE; a point with both errors zero adds nothing."""
    after, before = ((found.double() - targets.double()).abs() for found in (moved, clean))
    total = after + before
    change = (after - before).abs() / total.masked_fill(total == 0, 1.0)
    return 2 * float(change.mean())
