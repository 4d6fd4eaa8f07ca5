"""The contracts between the request side of the engine and the model side.

The engine owns requests, blocks and sampling; a runner owns the model, the KV pool and the attention backend. They meet
in `StepPlan` (plan.py) and in the protocols below, and nowhere else: a runner never sees a request, the engine never
sees a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .plan import StepPlan

if TYPE_CHECKING:
    import torch

    from .request import Request


@runtime_checkable
class ModelRunner(Protocol):
    """Runs one flat, unpadded batch `[1, total_tokens]` over a paged KV pool of `num_blocks` blocks.

    A runner may also have `sliding` (the `Sliding` mask that it applies), or `num_host_blocks`, `swap_seconds` (of one
    block in one direction) and `swap(out, back)`, which copies pairs (block, host block) out of the pool, then back.
    """

    block_size: int
    """Tokens a block holds."""
    num_blocks: int
    """Blocks in the pool, numbered 0 … num_blocks - 1. The engine may hand out every one of them; a runner that needs a
    scratch block (for padding of a captured graph, say) allocates it beyond `num_blocks`."""
    vocab_size: int
    """Columns of the logits. Every id in `Row.token_ids` is in 0 … vocab_size - 1; the engine checks prompts."""
    max_model_len: int
    """Most tokens (prompt and output together) that one request may have."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Write the keys and values of every row's tokens into their slots, attend, and return logits.

        Returns float32 `[plan.num_logits, vocab_size]` on the model's device, rows in plan order and, inside a row, the
        row's last `num_logits` positions in ascending order. The tensor may be a buffer that the next call overwrites;
        the engine is done with it before it calls again. The engine may write to it (penalties, masks) in place.

        Must be repeatable: executing the same row twice, or a row alone that was in a larger plan before, writes the
        same slots and gives the same logits. The engine relies on this to find the culprit when a step raises: it then
        executes the rows one by one. An exception leaves no state behind but the contents of the slots.

        A runner may have an attribute `tail_blocks`: blocks that every row's table has beyond those of its tokens, to
        keep what it must between a request's steps. The engine then cuts rows as `scheduler.one_tail` says.

        A plan with `num_logits == 0` (chunks of prompts only) returns an empty `[0, vocab_size]`.
        Raises whatever went wrong; the engine ends only the requests whose rows fail when they are executed alone.
        """
        ...

    def close(self) -> None:
        """Free the KV pool and anything that was started. Safe to call twice."""
        ...


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer: transformers' `PreTrainedTokenizerBase` has it all."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ..., **kwargs: object) -> str: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...


class Drafter(Protocol):
    """Proposes tokens for requests that are about to decode; the engine verifies them (lossless whatever is proposed).

    Called from the step loop only. `Request` is the engine's own object: read it, change nothing (a draft model may
    reserve blocks for its passes, see `Speculator`). Two methods more are called where a drafter has them:
    `begin(scheduler, ready, others)` before `propose`, with the requests that decode and the number of prompt tokens
    beside them, and `close()` when the engine closes.
    """

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """For each request the drafts (maybe none) that should follow its `token_ids`.

        If it raises, it is called again with one request at a time, and those for which it raises end with `error`.
        """
        ...

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A row with drafts was verified. Called before the accepted tokens are in `request.token_ids`."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...
