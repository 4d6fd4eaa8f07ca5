"""The sliding KV cache (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453): block tables that let go of what no later
token sees, and their scheduler. Pure Python, no torch.

The token at position q sees the positions k ≤ q with k > q - window or k < sinks; positions are the true ones. So once
`num_computed` tokens are in the cache, what lies between the kept first blocks and the window of token `num_computed`
is never read again, and its blocks are given back. A request of any length then holds at most `Sliding.most_blocks`
blocks between two steps. What a block holds follows from the tokens up to its end and from (sinks, window), which all
requests of an engine share: so blocks are hashed and reused as in any paged cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...optimizer.errors import RunError
from .blocks import BlockPool, BlockTable
from .plan import Row, StepPlan
from .request import Request
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig

GONE = -1
"""In a table's `ids`, a block that was given back."""


class Sliding(NamedTuple):
    """The settings: `sinks` ≥ 0 first tokens, and the last `window` ≥ 1, the token's own included."""

    sinks: int
    window: int

    def kept_blocks(self, block_size: int) -> int:
        """First blocks that a request never gives back: the sinks, rounded up."""
        return -(-self.sinks // block_size)

    def first_block(self, num_computed: int, block_size: int) -> int:
        """After the kept ones, the first block that the token at position `num_computed`, or a later one, reads."""
        return max(self.kept_blocks(block_size), (num_computed - self.window + 1) // block_size)

    def most_blocks(self, block_size: int) -> int:
        """Most blocks that a request needs to run one token, however long it is."""
        return self.kept_blocks(block_size) + (self.window + block_size - 2) // block_size + 1


class SlidingTable(BlockTable):
    """A table some of whose blocks may be gone; `as_tuple` names a block of the request's own in their place, so that
    whatever reads a masked position reads the request's own finite numbers."""

    __slots__ = ("first", "sliding")

    def __init__(self, pool: BlockPool, sliding: Sliding) -> None:
        super().__init__(pool)
        self.sliding = sliding
        self.first = sliding.kept_blocks(pool.block_size)
        """Blocks from here on have not been given back."""

    @property
    def readable_from(self) -> int:  # type: ignore[override]
        kept = self.sliding.kept_blocks(self.pool.block_size)
        return self.first * self.pool.block_size if self.first > kept else 0

    @property
    def num_held(self) -> int:
        return len(self.ids) - self.ids.count(GONE)

    def as_tuple(self) -> tuple[int, ...]:
        blocks = self.blocks
        if blocks is None:
            own = next((block for block in self.ids if block != GONE), 0)
            blocks = self.blocks = tuple([own if block == GONE else block for block in self.ids])
        return blocks

    def slide(self, num_computed: int) -> None:
        """Give back what no token from position `num_computed` on sees."""
        first = self.sliding.first_block(num_computed, self.pool.block_size)
        if first <= self.first:
            return
        for i in range(self.first, first):
            self.pool.release(self.ids[i])
            self.ids[i] = GONE
        self.first = first
        self.blocks = None

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """As `BlockTable.match`, but only the kept blocks and those of the next token's window must be cached; GONE
        stands for the others."""
        pool, sliding = self.pool, self.sliding
        if not pool.prefix_caching:
            return []
        size, limit = pool.block_size, max(0, len(token_ids) - 1)
        self.extend_digests(token_ids, limit)
        found = [pool.cached.get(digest, GONE) for digest in self.digests[: limit // size]]
        kept, head = sliding.kept_blocks(size), found.index(GONE) if GONE in found else len(found)
        best = run = 0
        for count, block in enumerate(found, 1):
            run = 0 if block == GONE else run + 1
            if head >= min(kept, count) and run >= count - sliding.first_block(count * size, size):
                best = count
        first = sliding.first_block(best * size, size)
        return [block if i < kept or i >= first else GONE for i, block in enumerate(found[:best])]

    def adopt(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block != GONE:
                self.pool.acquire(block)
        self.ids, self.num_registered, self.blocks = list(blocks), len(blocks), None
        self.first = self.sliding.first_block(len(blocks) * self.pool.block_size, self.pool.block_size)

    def release(self) -> None:
        self.ids = [block for block in self.ids if block != GONE]
        super().release()
        self.first = self.sliding.kept_blocks(self.pool.block_size)


class SlidingScheduler(Scheduler):
    """`Scheduler` whose requests let go of blocks as their windows move, so that no request is too long for the pool.

    Chunks of prompts are cut to the blocks that are free: none is taken from another request for the sake of a longer
    chunk. Admission reserves nothing but makes sure of the blocks that one request needs however long it is.
    """

    def __init__(
        self, config: SchedulerConfig, num_blocks: int, block_size: int, sliding: Sliding, tail_blocks: int = 0
    ) -> None:
        super().__init__(config, num_blocks, block_size, tail_blocks)
        self.sliding = sliding
        self.most_blocks = sliding.most_blocks(block_size) + tail_blocks

    @property
    def capacity(self) -> int:
        """Tokens that one request may have as far as the pool goes."""
        return 2**62 if self.pool.num_blocks >= self.most_blocks else super().capacity

    def new_table(self) -> BlockTable:
        return SlidingTable(self.pool, self.sliding)

    def fork(self, parent: Request, child: Request) -> None:
        """Add `child` in the parent's place in the order. The parent may have given back what the child sees, so the
        child is admitted like any other request; the prefix cache serves what is still there."""
        common = min(len(parent.token_ids), len(child.token_ids))
        if parent.token_ids[:common] != child.token_ids[:common]:
            raise RunError(f"request {child.id} does not continue request {parent.id}", where="scheduler")
        self.add(child, rank=parent.rank[0])

    def commit(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> None:
        super().commit(plan, tokens)
        for row in plan.rows:
            request = self.requests.get(row.request_id)
            if request is not None:
                _table(request).slide(request.num_computed)

    def _row(self, request: Request, room: int, logit_rows: int, preempted: list[int]) -> Row | None:
        spare = max(0, self.pool.num_free - len(self.running))  # the others may each need one
        fits = (len(request.table.ids) - self.pool.tail_blocks + spare) * self.pool.block_size - request.num_computed
        return super()._row(request, max(1, min(room, fits)), logit_rows, preempted)

    def _admit(self) -> Request | None:
        request = self._peek()
        table, pool = _table(request), self.pool
        hits = [] if request.wants_prompt_logprobs else table.match(request.token_ids)
        held = [block for block in hits if block != GONE]
        needed = -(-len(request.token_ids) // pool.block_size) - len(hits) + pool.tail_blocks
        needed = min(needed, max(1, self.most_blocks - len(held)))
        spare = pool.num_free - sum(1 for block in held if pool.ref_counts[block] == 0) - needed
        if spare < (self.watermark if self.running else 0):
            return None
        self._dequeue()
        table.adopt(hits)
        self._admitted(request, len(hits) * pool.block_size)
        return request


def _table(request: Request) -> SlidingTable:
    table = request.table
    assert isinstance(table, SlidingTable)
    return table
