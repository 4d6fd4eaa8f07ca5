"""Which tokens of which requests run in the next step. Pure Python, no torch.

One rule: every request catches `num_computed` up to `num_tokens + len(drafts)`. Chunked prefill, prefix hits, resume
after preemption and verification of drafts all follow from it.

Order. A request that arrives in step `a` with priority `p` has the rank `a - p * aging_steps`, smaller first (ties: the
earlier deadline, then the earlier arrival). The rank never changes, which amounts to waiting requests growing in
priority by one every `aging_steps` steps. Admission takes the best rank first and never skips one that does not fit;
preemption takes the worst, that is the lowest priority and among equals the newest.

Nobody starves. Let L be the pool's capacity in tokens (no request is longer) and w a waiting request. Only finitely
many requests ever rank before w: those that arrive before step a + (p_max - p) * aging_steps. Call N their number plus
max_num_seqs. (1) In every step the best-ranked running request gets at least one token and is never preempted, so it
ends within L steps unless a better one is admitted. (2) A preempted request ranks behind all that kept running and
blocks everything behind it in the queue, so when it is admitted again it is never the best: only first admissions
can displace the best, at most N of them before w's own. Hence w is admitted, and ends, within (2N + 1) * L steps. The
figure is loose; that it does not depend on later arrivals is the point. `tests/test_scheduler_fairness.py` shows it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from math import inf

from ...optimizer.errors import RunError, UsageError
from .blocks import BlockPool, BlockTable
from .plan import Row, StepPlan
from .request import FinishReason, Request, Status
from .scheduler_config import SchedulerConfig


class Scheduler:
    """Owns the queue, the running list and the block pool. Every call must come from one thread."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int, tail_blocks: int = 0) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, block_size, config.prefix_caching, tail_blocks)
        self.requests: dict[int, Request] = {}
        """Every request that has been added and has not ended."""
        self.running: list[Request] = []
        """In rank order."""
        self._waiting: list[tuple[tuple[float, float, int], Request]] = []
        """Heap by rank; ended requests are dropped when they come up."""
        self.num_waiting = 0
        self._deadlines: list[tuple[float, int]] = []
        self.watermark = int(config.watermark * num_blocks)
        """Blocks that admission, and drafts, leave free."""
        self.step = 0
        self.num_preemptions = 0
        self.prefix_queries = 0
        """Tokens that admissions looked up in the prefix cache, and (`prefix_hits`) found."""
        self.prefix_hits = 0

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds: no request may be longer."""
        return (self.pool.num_blocks - self.pool.tail_blocks) * self.pool.block_size

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request, rank: float | None = None) -> None:
        """Queue a request (`rank`: its first sort key, where it is not to be that of a newcomer). Raises `UsageError`
        if it could never run."""
        longest = min(request.max_total_tokens, self.capacity)
        if not request.token_ids:
            raise UsageError("the prompt has no tokens", where=f"request {request.request_id or request.id}")
        if len(request.token_ids) > longest:
            raise UsageError(
                f"{len(request.token_ids)} prompt tokens exceed the {longest} that the request may have",
                where=f"request {request.request_id or request.id}",
                what_to_do="Shorten the prompt, or enlarge the KV pool.",
            )
        if request.id in self.requests or request.finished:
            raise RunError(f"request {request.id} is added twice", where="scheduler")
        request.max_total_tokens = longest
        deadline = inf if request.deadline is None else request.deadline
        first = self.step - request.priority * self.config.aging_steps if rank is None else rank
        request.rank = (first, deadline, request.id)
        request.table = self.new_table()
        self.requests[request.id] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        self._enqueue(request)

    def new_table(self) -> BlockTable:
        """An empty table over the pool."""
        return BlockTable(self.pool)

    def fork(self, parent: Request, child: Request) -> None:
        """Add `child`, whose tokens begin as `parent`'s do, sharing the parent's committed full blocks.

        It takes the parent's place in the order. It starts running at once where a place is free and nothing better
        waits, and else waits like any other (the prefix cache may still serve it). A running request holds blocks, a
        waiting one none: that is what keeps the pool free of deadlock.
        """
        common = min(len(parent.token_ids), len(child.token_ids))
        if parent.token_ids[:common] != child.token_ids[:common]:
            raise RunError(f"request {child.id} does not continue request {parent.id}", where="scheduler")
        self.add(child, rank=parent.rank[0])
        if parent.status is not Status.RUNNING or len(self.running) >= self.config.max_num_seqs:
            return
        if self._peek() is not child or child.wants_prompt_logprobs:  # these need every position's logits
            return
        table = parent.table.fork(child.token_ids[:common])
        missing = table.missing(len(child.token_ids))
        if self.pool.num_free - missing < self.watermark:
            table.release()
            return
        table.grow(missing)
        child.table = table
        child.num_computed = child.num_cached_tokens = table.num_registered * self.pool.block_size
        self._dequeue()
        self._start(child)

    def expired(self, now: float) -> list[Request]:
        """Requests whose deadline has passed, each returned once. The caller finishes them."""
        late: list[Request] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                late.append(request)
        return late

    def schedule(self) -> StepPlan:
        """Plan one step and reserve its blocks. Nothing is committed: the same tokens are planned again if the step
        fails. A plan without rows means that nothing can run, which happens only if nothing is there."""
        self.step += 1
        running, max_seqs = self.running, self.config.max_num_seqs
        rows: list[Row] = []
        preempted: list[int] = []
        admitting = self.config.mode == "continuous" or not running
        budget = self.config.max_num_batched_tokens
        logit_rows = self.config.max_prompt_logprob_tokens
        size, free, new = self.pool.block_size, self.pool.free, tuple.__new__
        tail = self.pool.tail_blocks * size
        slack = budget - len(running)
        """Tokens beyond the one that each running request is to get."""
        for request in running:  # preemption shortens the list at its end, which a list's iterator bears
            own, start, table = request.token_ids, request.num_computed, request.table
            if len(own) - start == 1:  # decoding, with drafts or without: the common case, kept short
                drafts = request.drafts
                count = 1 + len(drafts)
                if count == 1 or (count <= slack + 1 and start + count < request.max_total_tokens and not tail):
                    blocks = table.blocks or table.as_tuple()
                    spare = len(blocks) * size - start - count - tail
                    if spare < 0 and (missing := -(spare // size)) <= len(free):
                        table.grow(missing)
                        blocks, spare = table.as_tuple(), spare + missing * size
                    if 0 <= spare < size:  # `new` makes a Row in half the time that its own constructor takes
                        rows.append(new(Row, (request.id, start, (own[-1], *drafts), blocks, count, count - 1)))
                        slack -= count - 1
                        continue
            others = len(running)
            row = self._row(request, slack + 1, logit_rows, preempted)
            if row is None:
                break  # the request itself was the last one left to preempt
            rows.append(row)
            slack += 1 - len(row.token_ids) + others - len(running)
            if request.wants_prompt_logprobs:
                logit_rows -= row.num_logits
        budget = slack
        while admitting and not preempted and self.num_waiting and len(running) < max_seqs:
            if budget <= 0 and self.config.mode == "continuous":
                break
            admitted = self._admit()
            if admitted is None:
                break
            row = self._row(admitted, budget, logit_rows, preempted) if budget > 0 else None
            if row is not None:
                rows.append(row)
                budget -= len(row.token_ids)
                if admitted.wants_prompt_logprobs:
                    logit_rows -= row.num_logits
        return StepPlan(tuple(rows), tuple(preempted))

    def commit(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> None:
        """Take over a step's result: `tokens[i]` are the tokens that row i's request gains, already cut at its end.

        A row that stopped short of its request's last token gains none; one that reached it gains 1, or 1 + accepted
        drafts. Rows of requests that have ended meanwhile are skipped. Raises `RunError` if the result does not fit
        the plan.
        """
        if len(tokens) != len(plan.rows):
            raise RunError(f"{len(tokens)} results for {len(plan.rows)} rows", where="scheduler commit")
        requests, size = self.requests, self.pool.block_size
        for row, gained in zip(plan.rows, tokens):
            request_id, start, inside, blocks, num_logits, _ = row
            request = requests.get(request_id)
            if request is None:
                continue
            table, own, count = request.table, request.token_ids, len(gained)
            base = len(own)
            if base - start == 1 and 0 < count <= num_logits:  # decoding, with drafts or without
                own += gained
                request.num_computed = computed = start + count
                if computed // size > table.num_registered:
                    table.commit(own, computed)
                if num_logits > 1:
                    request.drafts = ()
                    if count < num_logits or blocks is not table.blocks:  # else every block of the row is full
                        table.trim(computed + 1)
                continue
            end = start + len(inside)
            if count and (end < base or count > 1 + end - base):
                raise RunError(
                    f"request {row.request_id} gains {count} tokens from a row that ends at {end} of {base}",
                    where="scheduler commit",
                )
            request.token_ids.extend(gained)
            computed = base + count - 1 if count > 1 else min(end, base)
            request.num_computed = computed
            if computed // size > table.num_registered:
                table.commit(request.token_ids, computed)
            if end > base:
                request.drafts = ()
                table.trim(len(request.token_ids))
            if row.num_logits and request.params.prompt_logprobs is not None:
                request.num_prompt_logprobs = max(request.num_prompt_logprobs, min(end, request.num_prompt_tokens - 1))

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request and free its blocks: the only way out. False if it has ended before."""
        if request.finished:
            return False
        if request.status is Status.RUNNING:
            self._stop(request)
        elif request.id in self.requests:
            self.num_waiting -= 1
        request.status = Status.FINISHED
        request.finish_reason = reason
        self.requests.pop(request.id, None)
        if len(self._waiting) > 2 * self.num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if entry[1].status is Status.WAITING]
            heapq.heapify(self._waiting)
        return True

    def _row(self, request: Request, room: int, logit_rows: int, preempted: list[int]) -> Row | None:
        """The request's row of at most `room` (≥ 1) tokens, its blocks reserved; None if it had to be preempted."""
        start, num_tokens = request.num_computed, len(request.token_ids)
        drafts = request.drafts[: max(0, request.max_total_tokens - num_tokens - 1)]
        length = min(num_tokens + len(drafts) - start, room)
        first_logit = num_tokens - 1
        if request.wants_prompt_logprobs:
            first_logit = max(start, request.num_prompt_logprobs)
            length = min(length, max(1, first_logit - start + logit_rows))
        if self.pool.tail_blocks:
            length = one_tail(start, length, num_tokens, self.pool.block_size)
        table = request.table
        missing = table.missing(start + length)
        if missing > self.pool.num_free and start + length > num_tokens:  # drafts are given up before anyone's blocks
            length = num_tokens - start
            missing = table.missing(num_tokens)
        while missing > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim.id)
            if victim is request:
                return None
        table.grow(missing)
        end = start + length
        inside = request.token_ids[start:end]
        if end > num_tokens:
            inside += drafts[: end - num_tokens]
        num_logits = max(0, end - max(start, first_logit))
        blocks = table.as_tuple()
        needed = -(-end // self.pool.block_size) + self.pool.tail_blocks
        if len(blocks) != needed:
            blocks = blocks[:needed]
        return Row(request.id, start, tuple(inside), blocks, num_logits, max(0, end - num_tokens))

    def _admit(self) -> Request | None:
        """Start the best-ranked waiting request if blocks for all its tokens are there, else None."""
        request = self._peek()
        table = request.table
        hits = [] if request.wants_prompt_logprobs else table.match(request.token_ids)
        needed = -(-len(request.token_ids) // self.pool.block_size) - len(hits) + self.pool.tail_blocks
        revived = sum(1 for block in hits if self.pool.ref_counts[block] == 0)
        spare = self.pool.num_free - revived - needed
        if spare < (self.watermark if self.running else 0):
            return None
        self._dequeue()
        table.adopt(hits)
        table.grow(needed)
        self._admitted(request, len(hits) * self.pool.block_size)
        return request

    def _admitted(self, request: Request, num_cached: int) -> None:
        """Start a request whose table holds the blocks of its first `num_cached` tokens."""
        request.num_computed = num_cached
        if not request.num_preemptions:
            request.num_cached_tokens = num_cached
            self.prefix_queries += len(request.token_ids)
            self.prefix_hits += num_cached
        self._start(request)

    def _start(self, request: Request) -> None:
        request.status = Status.RUNNING
        insort(self.running, request, key=_rank)

    def _stop(self, request: Request) -> None:
        del self.running[bisect_left(self.running, request.rank, key=_rank)]
        request.table.release()

    def _preempt(self, request: Request) -> None:
        self._stop(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.drafts = ()
        request.status = Status.WAITING
        self.num_preemptions += 1
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.rank, request))
        self.num_waiting += 1

    def _peek(self) -> Request:
        while self._waiting[0][1].status is not Status.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1]

    def _dequeue(self) -> None:
        self._peek()
        heapq.heappop(self._waiting)
        self.num_waiting -= 1


def one_tail(start: int, length: int, num_tokens: int, size: int) -> int:
    """The length of a row, cut for a runner with `tail_blocks`: a row that begins inside a block ends in it, drafts lie
    in one block, and what is left of a prompt begins at a block where that is possible."""
    end = start + length
    if start % size:
        end = min(end, (start // size + 1) * size)
    if end > num_tokens:
        end = min(end, (num_tokens // size + 1) * size)
    elif end < num_tokens and end // size * size > start:
        end = end // size * size
    return end - start


def _rank(request: Request) -> tuple[float, float, int]:
    return request.rank
