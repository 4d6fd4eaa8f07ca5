"""What the scheduler hands to the model runner for one step.

Pure data, no torch: the scheduler, the simulator and the tests use it without a model. There are no prefill or
decode phases: a row is simply a run of consecutive tokens of one request whose keys and values are not in the cache
yet. A chunk of a prompt, the single token of a plain decode step and a verification row with its drafts differ only in
length and in how many of their positions need logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Row(NamedTuple):
    """One request's share of a step (a tuple, since a thousand of them are made every step).

    `token_ids[i]` stands at position `start + i` of the request and its keys and values go to slot
    `block_table[(start + i) // block_size] * block_size + (start + i) % block_size`.
    """

    request_id: int
    start: int
    """Tokens of this request whose keys and values already lie in the cache (`num_computed`)."""
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    """Block numbers that cover positions 0 … start + len(token_ids) - 1, in order."""
    num_logits: int
    """How many of the row's last positions need logits: 0 inside a chunked prefill, 1 + drafts at its end, more where
    prompt logprobs are asked for."""
    num_drafts: int = 0
    """How many of the row's last tokens are drafts, to be verified by the logits before them."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows in the order in which the runner lays their tokens into the flat batch `[1, total_tokens]`.

    The runner returns logits of shape `[sum(row.num_logits for row in rows), vocab_size]`, rows in the same order.
    """

    rows: tuple[Row, ...]
    preempted: tuple[int, ...] = field(default=())
    """Requests that lost their blocks in this step, and will be recomputed, or copied back."""
    swap_out: tuple[tuple[int, int], ...] = field(default=())
    """(block, host block): copies to make before anything is written, see `offload.py`."""
    swap_in: tuple[tuple[int, int], ...] = field(default=())
    """(block, host block): copies to make after those, before the step is run."""

    @property
    def total_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_logits(self) -> int:
        return sum(row.num_logits for row in self.rows)
