"""What an attack changed of a vector: the features that moved most."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from otad.evaluate.records import Evaluation
from otad.report.adversarial import ball_of
from otad.report.blocks import Block, Table
from otad.report.model_answers import answers

SHOWN = 6


def moved_blocks(
    evaluation: Evaluation,
    model: nn.Module,
    clean: Tensor,
    moved: Tensor,
    truths: Tensor,
    titles: Sequence[str],
    classes: Sequence[str] | None,
    feature_names: Sequence[str] | None,
) -> list[Block]:
    """A table for each example of clean and moved (m,*): answers, and the features in order of
    their change, measured as the threat measures it."""
    scale = ball_of(evaluation.threat, clean.shape[1:]).scale
    before, after = answers(model, clean), answers(model, moved)
    names = feature_names or [f"feature {place}" for place in range(clean[0].numel())]
    blocks: list[Block] = []
    for row, title in enumerate(titles):
        told = [_word(it[row], classes) for it in (before, after)]
        truth = _word(truths[row], classes)
        old, new = clean[row].flatten(), moved[row].flatten()
        change = (new - old) / (1 if scale is None else scale.flatten())
        order = change.abs().argsort(descending=True)[:SHOWN].tolist()
        rows = [("answer", *told, "")]
        rows += [
            (
                str(names[k]),
                f"{float(old[k]):.4g}",
                f"{float(new[k]):.4g}",
                f"{float(change[k]):+.3g}",
            )
            for k in order
        ]
        left = int((change != 0).sum()) - len(order)
        note = f"{title}. The right answer is {truth}."
        note += f" {left:,} more features moved less." if left > 0 else ""
        blocks.append(Table(("", "before", "attacked", "change"), rows, 0, note=note))
    return blocks


def _word(answer: Tensor, classes: Sequence[str] | None) -> str:
    """Logits (C,), a label or a value in words."""
    if bool(answer.isnan().any()):
        return "no answer"
    if answer.is_floating_point() and answer.dim() == 0:
        return f"{float(answer):.5g}"
    label = int(answer.argmax() if answer.dim() else answer)
    return str(label if classes is None else classes[label])
