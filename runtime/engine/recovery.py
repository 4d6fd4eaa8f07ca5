"""Running a step when a row of it may be poisonous: halves, and halves of halves, until the culprit stands alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .plan import Row, StepPlan
from .protocols import ModelRunner

if TYPE_CHECKING:
    import torch


def execute_surviving(
    runner: ModelRunner, plan: StepPlan
) -> tuple[StepPlan, torch.Tensor | None, list[tuple[Row, Exception]]]:
    """Execute a plan; where it raises, execute its halves, and so on.

    Returns the plan of the rows that succeeded, their logits float32 `[plan.num_logits, vocab_size]` (None if no row
    did), and each row that fails by itself with what it raised. A failure of the whole that no single row shows (out
    of memory, say) costs time only. Needs at most 2n - 1 calls for n rows; relies on `ModelRunner.execute` being
    repeatable.
    """
    try:
        return plan, runner.execute(plan), []
    except Exception as error:
        if len(plan.rows) == 1:
            return StepPlan(()), None, [(plan.rows[0], error)]
    import torch

    half = len(plan.rows) // 2
    rows: list[Row] = []
    logits: list[torch.Tensor] = []
    culprits: list[tuple[Row, Exception]] = []
    for part in (plan.rows[:half], plan.rows[half:]):
        survivors, values, failed = execute_surviving(runner, StepPlan(part))
        rows += survivors.rows
        culprits += failed
        if values is not None:
            logits.append(values.clone())  # the runner may overwrite its buffer in the next call
    return StepPlan(tuple(rows)), torch.cat(logits) if logits else None, culprits
