"""Speculation: who drafts how much in a step, from which source, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from .draft_costs import FLAT, StepCosts
from .draft_lookup import LookupSource
from .draft_model import Drafting
from .draft_policy import LONGEST, AcceptanceBook, Load, best_lengths, worthless
from .request import Request
from .scheduler import Scheduler

PASS_OVERHEAD = 2e-4
"""Seconds of a draft pass beside the model: laying out the batch and drawing the tokens."""
Drafts = list[tuple[int, ...]]


class Speculator:
    """Implements `Drafter` over one source of drafts, within the limits of load, KV pool and token budget.

    num_tokens: drafts of each request in each step; None adapts it to the request's acceptance and to the load. Either
    way there are none while blocks are short, and no more than the step's token budget leaves room for.
    costs: of the target's steps. draft_costs: of the draft model's, where the source is one.
    acceptance: the rate to begin with; None for the source's own guess.
    """

    def __init__(
        self,
        source: LookupSource | Drafting,
        num_tokens: int | None = None,
        costs: StepCosts = FLAT,
        draft_costs: StepCosts | None = None,
        acceptance: float | None = None,
    ) -> None:
        self.source, self.num_tokens = source, num_tokens
        self.costs, self.draft_costs = costs, draft_costs
        self.book = AcceptanceBook(source.priors if acceptance is None else [acceptance] * len(source.priors))
        self._kinds: dict[int, int] = {}
        """Class of the drafts under way, by request."""
        self._load = Load(1)
        self._free, self._room = 2**31, 2**31

    def begin(self, scheduler: Scheduler, ready: Sequence[Request], others: int) -> None:
        """Before `propose`: the step's load. ready: requests that decode; others: tokens of prompts beside them."""
        some = ready[:8]
        context = sum(request.num_tokens for request in some) / max(1, len(some))
        self._load = Load(len(ready), context, min(others, scheduler.config.max_num_batched_tokens))
        self._free = scheduler.pool.num_free - scheduler.watermark
        self._room = scheduler.config.max_num_batched_tokens - len(scheduler.running)

    def propose(self, requests: Sequence[Request]) -> Drafts:
        """See `Drafter.propose`. `begin` has told of the load."""
        nothing: Drafts = [()] * len(requests)
        if self._free <= 0 or self._room <= 0:
            return nothing
        if self.num_tokens is None and worthless(self.costs, self._load):
            return nothing
        longest = self.num_tokens or LONGEST
        limits = [min(longest, r.max_total_tokens - r.num_tokens - 1) for r in requests]
        if isinstance(self.source, LookupSource):
            return self._looked_up(self.source, requests, limits)
        return self._by_model(self.source, requests, limits)

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See `Drafter.observe`."""
        kind = self._kinds.get(request.id)
        if kind is not None:
            self.book.add(request.id, kind, num_drafts, num_accepted)
        if isinstance(self.source, Drafting):
            self.source.observe(request, num_accepted)

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`."""
        self._kinds.pop(request.id, None)
        self.book.forget(request.id)
        self.source.forget(request)

    def close(self) -> None:
        """Free what belongs to the drafts alone."""
        if isinstance(self.source, Drafting):
            self.source.close()

    def _looked_up(self, source: LookupSource, requests: Sequence[Request], limits: Sequence[int]) -> Drafts:
        found: Drafts = []
        kinds = []
        for request, limit in zip(requests, limits):
            drafts, kind = source.find(request, limit) if limit > 0 else ((), 0)
            if drafts and request.grammar is not None:
                drafts = drafts[: request.grammar.valid_prefix(drafts)]
            found.append(drafts)
            kinds.append(kind)
        lengths = self._lengths(requests, kinds, [len(drafts) for drafts in found])
        return [drafts[:length] for drafts, length in zip(found, lengths)]

    def _by_model(self, source: Drafting, requests: Sequence[Request], limits: Sequence[int]) -> Drafts:
        limits = [min(limit, source.limit(r)) if limit > 0 else 0 for r, limit in zip(requests, limits)]
        lengths = self._lengths(requests, [0] * len(requests), limits)
        if not any(lengths):
            return [()] * len(requests)
        for request, length in zip(requests, lengths):
            if length:  # the draft passes write all but the last draft's keys and values, as verification will
                request.table.grow(request.table.missing(request.num_tokens + length))
        drafts = source.draft(requests, lengths)
        for request, proposed, length in zip(requests, drafts, lengths):
            if length > len(proposed):
                request.table.trim(request.num_tokens + len(proposed))
        return drafts

    def _lengths(self, requests: Sequence[Request], kinds: Sequence[int], limits: Sequence[int]) -> list[int]:
        """How many drafts each request gets, at most its limit."""
        if self.num_tokens is not None:
            lengths = [max(0, limit) for limit in limits]
        else:
            rates = [self.book.rate(r.id, kind) if n > 0 else 0.0 for r, kind, n in zip(requests, kinds, limits)]
            seconds = None if self.draft_costs is None else self._draft_seconds
            lengths = best_lengths(rates, limits, self._load, self.costs, seconds)
            for request, kind, limit, length in zip(requests, kinds, limits, lengths):
                if limit > 0 and not length:
                    self.book.passed_over(request.id, kind)
        lengths = self._within_reach(requests, lengths)
        for request, kind, length in zip(requests, kinds, lengths):
            if length:
                self._kinds[request.id] = kind
        return lengths

    def _within_reach(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[int]:
        """The lengths, cut to the token budget and to the blocks that are free beside those of the step itself."""
        free = self._free - sum(max(0, request.table.missing(request.num_tokens)) for request in requests)
        room, out = self._room, []
        if free < 0:  # somebody is about to be preempted
            return [0] * len(lengths)
        for request, length in zip(requests, lengths):
            if length > 0:
                size, own = request.table.pool.block_size, -(-request.num_tokens // request.table.pool.block_size)
                length = max(0, min(length, room, (own + free) * size - request.num_tokens))
                free -= -(-(request.num_tokens + length) // size) - own
                room -= length
            out.append(length)
        return out

    def _draft_seconds(self, count: int) -> float:
        assert self.draft_costs is not None
        attention = count * self.draft_costs.attention(self._load.context)
        return self.draft_costs.of(count) + attention + PASS_OVERHEAD
