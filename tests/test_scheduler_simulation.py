"""Random schedules against the scheduler and the blocks, with a fake model whose tokens are a hash of the history.

The model's memory is a list of tokens by slot, read back through each row's block table: a wrong slot, position,
prefix hit or resume changes the hash and so the text. Every invariant is checked after every step. The default suite
runs a few hundred schedules; `LLMOPT_SCHEDULES=10000 pytest tests/test_scheduler_simulation.py` runs as many as named.
"""

import os
import random
from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmopt.runtime.engine.blocks import chain_hash
from llmopt.runtime.engine.request import Request, Status, stop_at
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler import Scheduler
from llmopt.runtime.engine.scheduler_config import SchedulerConfig

VOCABULARY = 7
EOS = 0


def next_token(history):
    return blake2b(bytes(history), digest_size=2).digest()[0] % VOCABULARY


def reference(prompt, limit, stop_ids, next_token=next_token):
    """The text that one request must have, whatever runs beside it."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens


class Simulation:
    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 3, 4, 8])
        self.num_blocks = rng.randrange(6, 24)
        seqs = rng.randrange(1, 7)
        self.scheduler = self.make_scheduler(
            SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=seqs + rng.choice([0, 1, 5, 30]),
                mode=rng.choice(["continuous", "continuous", "dynamic"]),
                watermark=rng.choice([0.0, 0.01, 0.2]),
                aging_steps=rng.choice([1, 3, 20]),
                prefix_caching=rng.random() < 0.8,
                max_prompt_logprob_tokens=rng.choice([1, 3, 100]),
            )
        )
        self.store = [None] * (self.num_blocks * self.block_size)
        self.everyone = []
        self.ended = Counter()
        self.now = 0.0
        self.limits = {}
        self.prompts = {}
        self.prompt_logits = Counter()
        self.accepted_drafts = 0

    # -- what other kinds of cache change

    def make_scheduler(self, config):
        return Scheduler(config, self.num_blocks, self.block_size)

    def next_token(self, tokens):
        return next_token(tokens)

    def prepare(self, plan):
        """Before a plan is executed; False where it is void."""
        return True

    def write(self, row):
        for i, token in enumerate(row.token_ids):
            self.store[self.slot(row, row.start + i)] = token

    def follow(self, row, first):
        """Per position first - 1 … of the row, what the model reads there: (next token, the token at the position)."""
        history = [self.store[self.slot(row, p)] for p in range(row.end)]
        return [(next_token(history[:end]), history[end - 1]) for end in range(first, row.end + 1)]

    def content(self, tokens, start):
        """What the slots of positions start … of a request with these tokens hold."""
        return tokens[start : start + self.block_size]

    # -- operations

    def new_request(self, prompt):
        rng = self.rng
        limit = min(len(prompt) + rng.randrange(1, 30), self.scheduler.capacity)
        params = SamplingParams(prompt_logprobs=0) if rng.random() < 0.15 else SamplingParams()
        request = Request(
            id=len(self.everyone),
            token_ids=list(prompt),
            params=params,
            priority=rng.choice([0, 0, 0, 1, -1, 3]),
            deadline=self.now + rng.randrange(1, 40) if rng.random() < 0.1 else None,
            max_total_tokens=limit,
            stop_ids=frozenset([EOS]) if rng.random() < 0.7 else frozenset(),
        )
        self.everyone.append(request)
        self.limits[request.id], self.prompts[request.id] = limit, list(prompt)
        return request

    def add(self):
        longest = min(24, self.scheduler.capacity - 1)
        length = self.rng.randrange(1, longest + 1)
        if self.everyone and self.rng.random() < 0.5:  # share a prefix with an earlier request
            base = self.rng.choice(self.everyone).token_ids
            shared = base[: self.rng.randrange(1, len(base) + 1)]
            prompt = [*shared, self.rng.randrange(1, VOCABULARY)][:length]
        else:
            prompt = [self.rng.randrange(1, VOCABULARY) for _ in range(length)]
        self.scheduler.add(self.new_request(prompt))

    def fork(self):
        parents = [r for r in self.scheduler.requests.values() if r.num_tokens < self.scheduler.capacity]
        if parents:
            parent = self.rng.choice(parents)
            cut = parent.num_tokens if self.rng.random() < 0.5 else self.rng.randrange(1, parent.num_tokens + 1)
            self.scheduler.fork(parent, self.new_request(parent.token_ids[:cut]))

    def abort(self):
        if self.scheduler.requests:
            self.end(self.rng.choice(list(self.scheduler.requests.values())), "abort")

    def end(self, request, reason):
        assert self.scheduler.finish(request, reason)
        assert not self.scheduler.finish(request, "abort")  # ends once
        self.ended[request.id] += 1
        full = reference(self.prompts[request.id], self.limits[request.id], request.stop_ids, self.next_token)
        if reason in ("stop", "length"):
            assert request.token_ids == full
        else:
            assert request.token_ids == full[: request.num_tokens]

    def draft(self):
        for request in self.scheduler.running:
            if request.num_tokens - request.num_computed != 1 or self.rng.random() < 0.4:
                continue
            drafts, tokens = [], list(request.token_ids)
            for _ in range(self.rng.randrange(1, 6)):
                right = self.next_token(tokens)
                drafts.append(right if self.rng.random() < 0.7 else self.rng.randrange(VOCABULARY))
                tokens.append(drafts[-1])
            request.drafts = tuple(drafts)

    # -- one step

    def step(self):
        self.now += 1
        for request in self.scheduler.expired(self.now):
            assert request.deadline <= self.now
            self.end(request, "deadline")
        running_before = list(self.scheduler.running)
        plan = self.scheduler.schedule()
        self.check_plan(plan, running_before)
        self.check_state()
        if not plan.rows:
            assert not self.scheduler.requests
            return
        if not self.prepare(plan):
            return
        gained = self.execute(plan)
        if self.rng.random() < 0.1:
            return  # the step failed before its commit: nothing may have changed
        if self.rng.random() < 0.05:
            culprit = self.scheduler.requests[self.rng.choice(plan.rows).request_id]
            self.end(culprit, "error")  # one row failed; the others commit
        results, finished = [], []
        for row, tokens in zip(plan.rows, gained):
            request = self.everyone[row.request_id]
            tokens, reason, _ = stop_at(request, tokens) if tokens else (tokens, None, None)
            results.append(tokens)
            if reason is not None and not request.finished:
                finished.append((request, reason))
        drafted = [r for r in map(self.everyone.__getitem__, (row.request_id for row in plan.rows)) if r.drafts]
        self.scheduler.commit(plan, results)
        for request in drafted:
            if request.status is Status.RUNNING and not request.drafts:
                assert request.table.missing(request.num_tokens) >= 0, "blocks of rejected drafts are kept"
        self.check_state()
        for request, reason in finished:
            self.end(request, reason)
        self.check_state()

    def slot(self, row, position):
        return row.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def execute(self, plan):
        written = set()
        for row in plan.rows:
            for i in range(len(row.token_ids)):
                slot = self.slot(row, row.start + i)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
        for row in plan.rows:
            self.write(row)
        gained = []
        for row in plan.rows:
            request = self.everyone[row.request_id]
            tokens = []
            base = request.num_tokens
            if request.wants_prompt_logprobs:
                last = min(row.end, request.num_prompt_tokens - 1)
                self.prompt_logits.update((request.id, p) for p in range(row.end - row.num_logits, last))
            if row.end >= base:
                assert row.num_logits >= row.end - base + 1
                for token, own in self.follow(row, base):
                    if tokens and tokens[-1] != own:
                        break
                    tokens.append(token)
                self.accepted_drafts += len(tokens) - 1
            gained.append(tokens)
        return gained

    # -- invariants

    def check_plan(self, plan, running_before):
        config = self.scheduler.config
        assert plan.total_tokens <= config.max_num_batched_tokens
        assert len(self.scheduler.running) <= config.max_num_seqs
        ids = [row.request_id for row in plan.rows]
        assert len(set(ids)) == len(ids)
        if running_before:
            best = running_before[0]
            assert best.status is Status.RUNNING and ids[0] == best.id, "the best-ranked request must always move"
        for request in running_before:  # whoever runs moves, unless it lost its blocks
            assert request.id in ids or request.id in plan.preempted
        for row in plan.rows:
            request = self.everyone[row.request_id]
            assert row.start == request.num_computed and row.token_ids
            assert len(row.block_table) == -(-row.end // self.block_size)
            known = tuple(request.token_ids[row.start : row.end])
            assert row.token_ids[: len(known)] == known
            assert row.end <= self.limits[request.id]

    def check_state(self):
        pool, holders = self.scheduler.pool, Counter()
        for request in self.everyone:
            table = request.table
            if request.status is not Status.RUNNING:
                assert not table or not table.ids, "only running requests hold blocks"
                continue
            held = [block for block in table.ids if block >= 0]
            assert len(set(held)) == len(held)
            assert table.num_registered <= request.num_computed // self.block_size
            assert request.num_computed < request.num_tokens or request.num_tokens == self.limits[request.id]
            assert len(table.ids) * self.block_size >= request.num_computed
            holders.update(held)
        for request in self.scheduler.running:
            for block in request.table.ids[request.table.num_registered :]:
                assert holders[block] == 1, "a block that is still written has two holders"
        assert [holders[b] for b in range(pool.num_blocks)] == pool.ref_counts
        assert set(pool.free) == {b for b in range(pool.num_blocks) if not holders[b]}
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda r: r.rank)
        waiting = sum(r.status is Status.WAITING for r in self.everyone)
        assert waiting == self.scheduler.num_waiting
        assert waiting + len(self.scheduler.running) == len(self.scheduler.requests)
        assert {pool.hashes[b]: b for b in range(pool.num_blocks) if pool.hashes[b] is not None} == pool.cached

    def check_cache(self):
        """What the cache offers under a hash is what the slots hold."""
        known = {}
        for request in self.everyone:
            parent = b"llmopt"
            for i in range(request.num_tokens // self.block_size):
                start = i * self.block_size
                parent = chain_hash(parent, request.token_ids[start : start + self.block_size])
                known[parent] = self.content(request.token_ids, start)
        for digest, block in self.scheduler.pool.cached.items():
            stored = self.store[block * self.block_size : (block + 1) * self.block_size]
            assert stored == known[digest], "a cached block holds other tokens than its hash says"

    def run(self, steps):
        operations = [self.add, self.add, self.add, self.fork, self.abort]
        for _ in range(steps):
            for _ in range(self.rng.randrange(0, 3)):
                self.rng.choice(operations)()
                self.check_state()
            if self.rng.random() < 0.5:
                self.draft()
            self.step()
        self.check_cache()
        for _ in range(100_000):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests, "a request starves"
        assert all(self.ended[r.id] == 1 and r.finish_reason for r in self.everyone)
        assert self.scheduler.pool.num_free == self.num_blocks
        for request in self.everyone:
            if request.params.prompt_logprobs is not None and request.finish_reason in ("stop", "length"):
                for position in range(request.num_prompt_tokens - 1):
                    assert self.prompt_logits[request.id, position] >= 1
        return self


SCHEDULES = int(os.environ.get("LLMOPT_SCHEDULES", "400"))


def test_random_schedules():
    """Seeded, so that a failure names the schedule: `Simulation(seed).run(40)`."""
    preemptions = hits = accepted = forks = 0
    for seed in range(SCHEDULES):
        try:
            simulation = Simulation(seed).run(40)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
        preemptions += simulation.scheduler.num_preemptions
        hits += simulation.scheduler.prefix_hits
        accepted += simulation.accepted_drafts
        forks += sum(1 for r in simulation.everyone if r.num_cached_tokens)
    # The schedules must have been worth their name.
    assert min(preemptions, hits, accepted, forks) > SCHEDULES


@pytest.mark.slow
def test_ten_thousand_schedules():
    for seed in range(10_000, 20_000):
        try:
            Simulation(seed).run(40)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(5, 60))
def test_property_any_seed_any_length(seed, steps):
    Simulation(seed).run(steps)
