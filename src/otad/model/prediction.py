"""`predict`: the answers of a model, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import torch
from torch import Tensor, nn

from otad.checks import check_count, check_evaluation, taking
from otad.model.captured import captured
from otad.model.conversion import ArrayLike, Estimator, converted_inputs
from otad.progress import Counter, progress_bar
from otad.workers import Workers, in_batches

FEWEST_BATCHES = 10  # because a CUDA graph takes as long to capture as three batches take


def predict(
    model: nn.Module | Estimator,
    x: ArrayLike,
    *,
    batch_size: int = 1000,
    executor: Executor | Workers | int | None = None,
    progress: Counter | bool | None = None,
) -> Tensor:
    """Return the outputs of a model for many inputs, batch by batch.

    Parameters
    ----------
    model : Module or estimator
        A torch module, such as a defended model, or a fitted estimator.
    x : Tensor, array, DataFrame or DataLoader (n, *input_shape)
        Inputs.
    batch_size : int
        Rows at once.
    executor : Executor, int or None
        Who answers the batches; see `otad.evaluate`.
    progress : callable, bool or None
        A function of (rows done, rows in total). True draws a progress bar, False draws none, and
        None draws one on a terminal when the work takes longer than two seconds.

    Returns
    -------
    Tensor (n, C) or (n,)
        Logits, or values in regression. They are NaN where the model abstains.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
    >>> x = torch.rand(5, 3)
    >>> torch.allclose(otad.predict(model, x, batch_size=2), model(x))
    True
    """
    module, inputs, _ = converted_inputs(model, x)
    check_evaluation(module, "model")
    rows = check_count(batch_size, "batch_size")
    many = executor is None and len(inputs) >= FEWEST_BATCHES * rows
    answering = (many and captured(module, inputs[:rows])) or module
    with progress_bar("predicting", progress) as report:
        return torch.cat(in_batches(_outputs, answering, inputs, rows, executor, report))


@torch.no_grad()
def _outputs(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with taking(x, "model"):
        return model(x)
