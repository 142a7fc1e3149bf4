"""A score with the interval that its number of test points allows.

Tables, reports, pictures and the terminal show shares such as accuracies in percent. Functions,
attributes and JSON have them from 0 to 1, except `Score`, which is in percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Score:
    """A `value` over `n` points with its 95% interval [low, high]. "accuracy" is in percent with
    Wilson's interval; "mse" has the normal interval of a mean."""

    metric: str
    value: float
    low: float
    high: float
    n: int

    @property
    def rank(self) -> float:
        """Larger is better."""
        return -self.value if self.metric == "mse" else self.value


def score_text(metric: str, value: float, digits: int = 2) -> str:
    """Return an accuracy from 0 to 1 in percent, and an error with four digits."""
    return f"{value:.{digits}%}" if metric.endswith("accuracy") else f"{value:.4g}"


def score_of(outputs: Tensor, targets: Tensor) -> Score:
    """Score logits (B,C) against labels, or values (B,) against targets. An abstention (NaN) counts
    as wrong. In regression it counts as infinitely wrong, so that the mean and its interval are
    infinite."""
    n = len(targets)
    if outputs.dim() == 2:
        return share_score(int(is_right(outputs, targets).sum()), n)
    errors = squared_errors(outputs, targets)
    mean = float(errors.mean())
    if math.isinf(mean):
        return Score("mse", mean, mean, mean, n)
    reach = Z_95 * float(errors.std()) / math.sqrt(n) if n > 1 else math.inf
    return Score("mse", mean, max(mean - reach, 0.0), mean + reach, n)


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return where (B,) the largest of the logits (B,C) is at the label; an abstention is never
    right."""
    return (logits.argmax(1) == labels) & ~abstained(logits)


def squared_errors(values: Tensor, targets: Tensor) -> Tensor:
    """Return squared errors (B,) in float64; the error of an abstention is infinite."""
    return (values.double() - targets.double()).square().masked_fill(abstained(values), math.inf)


def abstained(outputs: Tensor) -> Tensor:
    """Return where (B,) a model gave no answer: where logits (B,C) or values (B,) are NaN."""
    return outputs.isnan().view(len(outputs), -1).any(1)


def regression_metrics(outputs: Tensor, clean: Tensor, targets: Tensor) -> dict[str, float]:
    """How far perturbed inputs move the answers (n,) of a regression: E and SMAPE.

    The measures of Gupta et al. 2021, "An Adversarial Attacker for Neural Networks in Regression
    Problems" (CEUR workshop proceedings 2916), which the OTAD paper takes. It prints no formulas;
    these agree with the figures of its undefended rows (see the tests). With f the model, y_i the
    targets, x_i + d_i the perturbed inputs, a_i = |f(x_i + d_i) - y_i| and c_i = |f(x_i) - y_i|:

        E     = 1/n sum_i |f(x_i + d_i) - f(x_i)|
        SMAPE = 2/n sum_i |a_i - c_i| / (a_i + c_i)

    An abstention is infinitely far from every answer and infinitely wrong: a point whose answer is
    lost or gained makes E infinite and adds 2 to the sum of SMAPE; one without an answer at either
    input has not changed and adds nothing to either.
    """
    lost, never = abstained(outputs), abstained(clean)
    change = (outputs.double() - clean.double()).abs()
    change = change.masked_fill(lost | never, math.inf).masked_fill(lost & never, 0.0)
    after, before = (squared_errors(found, targets).sqrt() for found in (outputs, clean))
    larger, smaller = after.maximum(before), after.minimum(before)
    # (1 - r) / (1 + r) with r the smaller error over the larger: also where that is infinite
    ratio = (smaller / larger).masked_fill(larger == smaller, 1.0)
    return {"E": float(change.mean()), "SMAPE": 2 * float(((1 - ratio) / (1 + ratio)).mean())}


def share_score(successes: int, n: int) -> Score:
    """Return an accuracy: so many of n are right."""
    low, high = wilson_interval(successes, n)
    return Score("accuracy", 100 * successes / n, 100 * low, 100 * high, n)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The shares p with |successes/n - p| <= z sqrt(p (1 - p) / n), by the quadratic formula."""
    share, z = successes / n, Z_95
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, min(share, center - reach)), min(1.0, max(share, center + reach))
