"""Speculation: who drafts how much in a step, from which source, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from .draft_account import Account
from .draft_costs import FLAT, LearntCosts, StepCosts
from .draft_lookup import LookupSource
from .draft_model import Drafting
from .draft_policy import (
    LONGEST,
    AcceptanceBook,
    Load,
    best_lengths,
    drafts_seconds,
    expected_gain,
    least_rate,
    plain_seconds,
)
from .plan import StepPlan
from .request import Request
from .scheduler import Scheduler

PASS_OVERHEAD = 2e-4
"""Seconds of a draft pass beside the model: laying out the batch and drawing the tokens."""
BASELINE = 64
"""Steps within which one of about as many tokens as there are requests must have been seen: else there is one without
drafts, to know what plain decoding costs now."""
PROBE = (4, 256)
"""Looks for drafts (`REST`) between probes, at least and at most."""
REACH = 1.5
"""Steps with drafts have at most so many times the tokens of the largest step whose cost is known."""
PROVEN = 16
"""Tried drafts from which on a draft model may read the prompts of all requests."""
FORESEEN = 256
"""Most tokens of a request that are counted on when a draft model's work on its prompt is weighed."""
REST = (8, 3)
"""After each so many looks for drafts without an accepted one the next look is a step later, by so many at most: where
nothing is found, looking is all that drafts cost."""
Drafts = list[tuple[int, ...]]


def in_block(request: Request) -> int:
    """Most drafts that keep the row in the block of the last token, where the runner needs that (`one_tail`)."""
    pool = request.table.pool
    return -request.num_tokens % pool.block_size if pool.tail_blocks else request.max_total_tokens


class Speculator:
    """Implements `Drafter` over one source of drafts, within the limits of load, KV pool and token budget.

    num_tokens: drafts of each request in each step; None adapts it to the request's acceptance and to the load. Either
    way there are none while blocks are short, and no more than the step's token budget leaves room for.
    costs: of the target's steps, to begin with: they are learnt from every step (`timed`). draft_costs: of the draft
    model's, where the source is one.
    acceptance: the rate to begin with; None for the source's own guess. learn: False keeps to the costs as they are
    given, and to no account: then nothing hangs on the time that steps take.
    """

    def __init__(
        self,
        source: LookupSource | Drafting,
        num_tokens: int | None = None,
        costs: StepCosts = FLAT,
        draft_costs: StepCosts | None = None,
        acceptance: float | None = None,
        learn: bool = True,
    ) -> None:
        self.source, self.num_tokens, self._learns = source, num_tokens, learn and num_tokens is None
        self._learnt, self.draft_costs = LearntCosts(costs), draft_costs
        self.account = Account()
        self.book = AcceptanceBook(source.priors if acceptance is None else [acceptance] * len(source.priors))
        self._kinds: dict[int, int] = {}
        """Class of the drafts under way, by request."""
        self._load = Load(1)
        self._free, self._room = 2**31, 2**31
        self._begun = False
        self._accepted = 0
        """Drafts of the step under way that were accepted."""
        self._passes, self._caught_up = 0.0, 0.0
        """Seconds that its draft passes should take, and those of them that catch up with texts."""
        self._interval = self._until_probe = PROBE[0]
        self._probes = 0
        self._least = 0.0
        """Acceptance below which no drafts pay in this step."""
        self._without = self._skipped = 0
        """Looks in a row since which no draft was accepted; steps since the last of them."""
        self._pace = 1.0
        """What draft passes take, as a multiple of what was measured at load."""

    @property
    def costs(self) -> StepCosts:
        """Of the target's steps as far as they are known now."""
        return self._learnt.now

    def begin(self, scheduler: Scheduler, ready: Sequence[Request], others: int) -> None:
        """Before `propose`: the step's load. ready: requests that decode; others: tokens of prompts beside them."""
        some = ready[:8]
        context = sum(request.num_tokens for request in some) / max(1, len(some))
        self._load = Load(len(ready), context, min(others, scheduler.config.max_num_batched_tokens))
        self._free = scheduler.pool.num_free - scheduler.watermark
        self._room = scheduler.config.max_num_batched_tokens - len(scheduler.running)
        self._begun, self._accepted, self._passes, self._caught_up = True, 0, 0.0, 0.0

    def propose(self, requests: Sequence[Request]) -> Drafts:
        """See `Drafter.propose`. `begin` has told of the load."""
        nothing: Drafts = [()] * len(requests)
        if self._free <= 0 or self._room <= 0:
            return nothing
        if self.num_tokens is None:
            if self._skipped < min(self._without // REST[0], REST[1]):
                self._skipped += 1
                return nothing
            self._skipped, self._least = 0, least_rate(self.costs, self._load)
            self._without += 1
            if self._least >= 1:
                return nothing
        longest = self.num_tokens or LONGEST
        limits = [min(longest, r.max_total_tokens - r.num_tokens - 1, in_block(r)) for r in requests]
        if isinstance(self.source, LookupSource):
            return self._looked_up(self.source, requests, limits)
        return self._by_model(self.source, requests, limits)

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See `Drafter.observe`."""
        self._accepted += num_accepted
        if num_accepted:
            self._interval, self._without = PROBE[0], 0
        kind = self._kinds.get(request.id)
        if kind is not None:
            self.book.add(request.id, kind, num_drafts, num_accepted)
        if isinstance(self.source, Drafting):
            self.source.observe(request, num_accepted)

    def timed(self, plan: StepPlan, seconds: float, draft_seconds: float) -> None:
        """The step that `begin` told of has run as `plan`, in `seconds`, `draft_seconds` of which made the drafts."""
        if not self._learns:
            return
        self.book.end_step()
        if not self._begun:
            self.account.settle(seconds)
            return
        self._begun = False
        load, costs = self._load, self.costs
        drafts, own = sum(row.num_drafts for row in plan.rows), draft_seconds if self._passes else 0.0
        if self._passes and not self._caught_up:
            self._pace *= 1 + 0.1 * (min(max(own / self._passes, 0.5), 2.0) - 1)
        alone = not load.others and len(plan.rows) == load.decoding
        if alone:
            attention = load.decoding * costs.attention(load.context) + drafts * costs.token_context * load.context
            self._learnt.learn(load.decoding + drafts, max(seconds - draft_seconds - attention, 1e-9))
        plain = plain_seconds(self.costs, load)
        net = self._accepted * plain / max(1, load.decoding) - drafts_seconds(self.costs, load, drafts) - own
        self.account.settle(seconds, net)

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`."""
        self._without = 0  # other texts come
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
            lengths = [0] * len(requests)
            if max(rates) > self._least:
                lengths = best_lengths(rates, limits, self._load, self.costs, seconds)
            if self._learns:
                lengths = self._affordable(requests, rates, lengths)
            if self._learns and not any(lengths):
                lengths = self._affordable(requests, rates, self._probe(limits))
            for request, kind, limit, length in zip(requests, kinds, limits, lengths):
                if limit > 0 and not length:
                    self.book.passed_over(request.id, kind)
        if not any(lengths):
            return lengths
        lengths = self._within_reach(requests, lengths)
        for request, kind, length in zip(requests, kinds, lengths):
            if length:
                self._kinds[request.id] = kind
        return lengths

    def _probe(self, limits: Sequence[int]) -> list[int]:
        """Now and then, where no drafts seem to pay, one of one token for one request: that it does not is found out
        anew ever more seldom, that it does opens the way."""
        candidates, lengths = [i for i, limit in enumerate(limits) if limit > 0], [0] * len(limits)
        self._until_probe -= 1
        if candidates and self._until_probe <= 0:
            self._probes += 1
            self._until_probe = self._interval
            lengths[candidates[self._probes % len(candidates)]] = 1
            self._interval = min(2 * self._interval, PROBE[1])
        return lengths

    def _affordable(self, requests: Sequence[Request], rates: Sequence[float], lengths: Sequence[int]) -> list[int]:
        """The lengths, or shorter ones, or none: as the account allows."""
        load, lengths = self._load, list(lengths)
        if not any(lengths):
            return lengths
        if not load.others and not self._learnt.known(load.decoding, BASELINE):
            return [0] * len(lengths)
        plain = plain_seconds(self.costs, load)
        self._caught_up = 0.0
        if isinstance(self.source, Drafting) and self.draft_costs is not None:
            lengths = self._worth_catching_up(self.source, requests, rates, lengths, plain)
        for longest in (LONGEST, 4, 1):
            cut = [min(longest, length) for length in lengths]
            if load.decoding + load.others + sum(cut) > REACH * self.costs.sizes[-1]:
                continue
            self._passes = self._caught_up
            if self.draft_costs is not None:
                depths = range(1, max(cut) + 1)
                self._passes += sum(self._draft_seconds(sum(n >= depth for n in cut)) for depth in depths)
            needed = drafts_seconds(self.costs, load, sum(cut)) + self._passes
            if self.account.allows(plain, needed, self._caught_up):
                return cut
        self._passes = self._caught_up = 0.0
        return [0] * len(lengths)

    def _worth_catching_up(
        self, source: Drafting, requests: Sequence[Request], rates: Sequence[float], lengths: list[int], plain: float
    ) -> list[int]:
        """No drafts for requests whose text the draft model would have to compute for longer than drafts could save."""
        behind = [source.behind(r) if length else 0 for r, length in zip(requests, lengths)]
        total = sum(behind)
        if not total:
            return lengths
        costs, each = self.draft_costs or FLAT, plain / max(1, self._load.decoding)
        slope = self._pace * (costs.of(total + 1) - costs.of(1)) / total
        if self.book.trials(0) < PROVEN:  # one request shows what the model is worth before it reads all prompts
            first = min((i for i, length in enumerate(lengths) if length), key=lambda i: behind[i])
            lengths = [length if i == first else 0 for i, length in enumerate(lengths)]
        out = []
        for request, rate, length, missing in zip(requests, rates, lengths, behind):
            gain = expected_gain([rate], [length])
            left = min(FORESEEN, request.max_total_tokens - request.num_tokens)
            worth = missing * slope <= left * each * gain / (1 + gain)
            out.append(length if worth else 0)
            self._caught_up += missing * slope if worth else 0.0
        return out

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
        return self._pace * (self.draft_costs.of(count) + attention + PASS_OVERHEAD)
