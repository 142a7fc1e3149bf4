"""How far a step moves a regression, by the measures the paper takes from Gupta et al. 2021.

"An Adversarial Attacker for Neural Networks in Regression Problems" (CEUR workshop proceedings
2916). The OTAD paper prints no formulas; these are borne out by the figures of its undefended rows
(see the tests). With f the model, y_i the targets and x_i + d_i the moved inputs of n points, a_i =
|f(x_i + d_i) - y_i| and c_i = |f(x_i) - y_i|:

    E     = 1/n sum_i |f(x_i + d_i) - f(x_i)|
    SMAPE = 2/n sum_i |a_i - c_i| / (a_i + c_i)

so E is a distance between answers, and SMAPE, from 0 to 2, compares their errors, not the answers.

An abstention is infinitely far from every answer and as wrong. So a point whose answer is lost or
gained makes E infinite and adds 2, the most there is, to the sum of SMAPE; one that has no answer
at either place has not moved and adds nothing to either.
"""

from __future__ import annotations

import math

from torch import Tensor

from otad.scores import absolute_errors, abstained

E, SMAPE = "E", "SMAPE"


def shifts(moved: Tensor, clean: Tensor, targets: Tensor) -> dict[str, float]:
    """E and SMAPE of answers (n,) at moved and at clean inputs."""
    return {E: mean_shift(moved, clean), SMAPE: smape(moved, clean, targets)}


def mean_shift(moved: Tensor, clean: Tensor) -> float:
    """E."""
    lost, never = abstained(moved), abstained(clean)
    shift = (moved.double() - clean.double()).abs()
    return float(shift.masked_fill(lost | never, math.inf).masked_fill(lost & never, 0.0).mean())


def smape(moved: Tensor, clean: Tensor, targets: Tensor) -> float:
    """SMAPE; a point that is as wrong as before adds nothing."""
    after, before = (absolute_errors(found, targets) for found in (moved, clean))
    larger, smaller = after.maximum(before), after.minimum(before)
    # (1 - r) / (1 + r) with r the smaller error over the larger: also where that is infinite
    ratio = (smaller / larger).masked_fill(larger == smaller, 1.0)
    return 2 * float(((1 - ratio) / (1 + ratio)).mean())
