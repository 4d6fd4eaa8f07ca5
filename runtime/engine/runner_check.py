"""A runner proves itself against transformers before it serves.

Counting attention calls finds the models that bypass the interface. What else may be wrong for an architecture nobody
tried (positions taken from the batch's indices, a state beside keys and values, a mask of its own) shows in numbers: a
chunked, mixed step must give the logits that each request gets alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError
from ..attention.probe import INSTEAD, attention_implementation
from .plan import Row, StepPlan

if TYPE_CHECKING:
    import torch

TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.2, "float16": 0.1}
"""Largest relative error (2-norm of the difference over that of the reference) by activation dtype. The bounds are
loose, they separate rounding from wrong numbers: a wrong mask or position gives 0.3 and more."""

FORMAT_TOLERANCE = {"int8": 0.1, "fp8_e4m3": 0.2, "int4": 0.5}
"""The same of a quantized KV cache, where it is more: the probe's random tokens are hard on a trained model."""


def self_check(runner: Any) -> float:
    """Relative error of a mixed step against eager attention. Raises RunError where it is above the tolerance.

    Writes into blocks 0 … of the pool: call it before the runner serves. Skipped (0.0) where the pool is too small.
    """
    import torch

    size, tail = runner.block_size, getattr(runner, "tail_blocks", 0)
    long, short = min(13, runner.max_model_len), min(7, runner.max_model_len)
    blocks_long, blocks_short = -(-long // size) + tail, -(-short // size) + tail
    if blocks_long + blocks_short > runner.num_blocks or long < 3:
        runner.notes.append("self-check skipped: the pool or the context is too small for it")
        return 0.0
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, runner.vocab_size, (long + short,), generator=generator)
    first, second = ids[:long], ids[long:]
    # Tables that run backwards and share no block: contiguity must not be assumed.
    table_a = tuple(range(blocks_long - 1, -1, -1))
    table_b = tuple(range(blocks_long + blocks_short - 1, blocks_long - 1, -1))
    cut = max(1, long - 4)
    if tail and cut // size != (long - 1) // size:  # a row that begins inside a block ends in it
        cut = (long - 1) // size * size
    runner.execute(StepPlan((Row(-1, 0, tuple(first[:cut].tolist()), table_a[: -(-cut // size) + tail], 0),)))
    got = runner.execute(
        StepPlan(
            (
                Row(-2, 0, tuple(second.tolist()), table_b, 1),
                Row(-1, cut, tuple(first[cut:].tolist()), table_a, long - cut),
            )
        )
    )
    with attention_implementation(runner.model, "eager"), torch.inference_mode():
        want = torch.cat(
            [
                runner.model(input_ids=x[None].to(runner.device), use_cache=False).logits[0, -keep:].float()
                for x, keep in ((second, 1), (first, long - cut))
            ]
        )
    error = _relative(got, want)
    limit = max(
        TOLERANCE.get(str(runner.dtype).removeprefix("torch."), 0.2), FORMAT_TOLERANCE.get(runner.kv_dtype, 0.0)
    )
    if not error <= limit:
        raise RunError(
            f"the continuous-batching engine gives {type(runner.model).__name__} other logits than transformers does: "
            f"relative error {error:.3g}, at most {limit:g} is rounding",
            "self-check at load",
            INSTEAD,
        )
    return error


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-30))
