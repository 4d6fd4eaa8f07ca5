"""Random schedules over the sliding cache: as `test_scheduler_simulation.py`, with a fake model that has the mask.

Each slot keeps the state of its position: a hash of its token, its position, and the states of the positions it sees,
so that it depends on earlier tokens as a layered model's keys and values do, and on nothing that was given back.
"""

import os
from functools import cache
from hashlib import blake2b

import pytest
from llmopt.runtime.engine.blocks import BlockPool
from llmopt.runtime.engine.sliding import GONE, Sliding, SlidingScheduler, SlidingTable
from llmopt.tests.test_scheduler_simulation import VOCABULARY, Simulation

SCHEDULES = int(os.environ.get("LLMOPT_SCHEDULES", "100"))


def state(token, position, seen):
    return blake2b(b"".join([bytes([token]), position.to_bytes(4, "little"), *seen]), digest_size=8).digest()


def visible(position, sinks, window):
    return [k for k in range(position) if k < sinks or k > position - window]


@cache
def states(tokens, sinks, window):
    """Of every position, computed without any engine."""
    if not tokens:
        return ()
    before, last = states(tokens[:-1], sinks, window), len(tokens) - 1
    return (*before, state(tokens[-1], last, [before[k] for k in visible(last, sinks, window)]))


class SlidingSimulation(Simulation):
    def make_scheduler(self, config):
        rng = self.rng
        self.sliding = Sliding(rng.choice([0, 1, 2, 4, 5]), rng.choice([1, 2, 3, 7, 12]))
        self.num_blocks = max(self.num_blocks, self.sliding.most_blocks(self.block_size) + rng.choice([0, 0, 1, 5]))
        if rng.random() < 0.3:
            self.num_blocks = self.sliding.most_blocks(self.block_size)
        self.tokens = {}
        self.longest = 0
        scheduler = SlidingScheduler(config, self.num_blocks, self.block_size, self.sliding)
        commit = scheduler.commit

        def checked(plan, tokens):
            commit(plan, tokens)
            for row in plan.rows:
                request = scheduler.requests.get(row.request_id)
                if request is not None:
                    # blocks further on are those of a longer row of a step that failed
                    ids = request.table.ids[: request.num_computed // self.block_size + 1]
                    assert len(ids) - ids.count(GONE) <= self.sliding.most_blocks(self.block_size)
                    self.longest = max(self.longest, request.num_tokens)

        scheduler.commit = checked
        return scheduler

    def next_token(self, tokens):
        return states(tuple(tokens), *self.sliding)[-1][0] % VOCABULARY

    def write(self, row):
        for i, token in enumerate(row.token_ids):
            position = row.start + i
            seen = [self.store[self.slot(row, k)] for k in visible(position, *self.sliding)]
            slot = self.slot(row, position)
            self.store[slot] = state(token, position, seen)
            self.tokens[slot] = token

    def follow(self, row, first):
        slots = [self.slot(row, end - 1) for end in range(first, row.end + 1)]
        return [(self.store[slot][0] % VOCABULARY, self.tokens[slot]) for slot in slots]

    def content(self, tokens, start):
        return list(states(tuple(tokens), *self.sliding)[start : start + self.block_size])


def run(first, count):
    preemptions = hits = accepted = beyond = 0
    for seed in range(first, first + count):
        try:
            simulation = SlidingSimulation(seed).run(40)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
        scheduler = simulation.scheduler
        preemptions += scheduler.num_preemptions
        hits += scheduler.prefix_hits
        accepted += simulation.accepted_drafts
        beyond += simulation.longest > scheduler.pool.num_blocks * scheduler.pool.block_size
    # The schedules must have been worth their name.
    assert min(preemptions, hits, accepted) > count and beyond > count // 20


def test_random_schedules():
    """Seeded, so that a failure names the schedule: `SlidingSimulation(seed).run(40)`."""
    run(0, SCHEDULES)


@pytest.mark.slow
def test_a_thousand_schedules():
    run(10_000, 1_000)


# -- one table


def test_a_table_gives_back_what_no_later_token_sees():
    pool = BlockPool(20, 4)
    table = SlidingTable(pool, Sliding(5, 6))
    tokens = list(range(40))
    table.grow(table.missing(24))
    table.commit(tokens, 24)
    table.slide(24)  # position 24 sees 19 … 24 and 0 … 4: blocks 0, 1 and 4 onwards
    assert [block == GONE for block in table.ids] == [False, False, True, True, False, False]
    assert table.num_held == 4 and pool.num_free == 16
    assert table.as_tuple() == (0, 1, 0, 0, 4, 5)  # the request's own first block stands in for what is gone
    table.slide(24)
    table.slide(20)  # a window never moves back
    assert pool.num_free == 16
    table.release()
    assert pool.num_free == 20 and pool.ref_counts == [0] * 20


def test_a_prefix_is_found_without_its_middle_and_not_without_its_window():
    pool = BlockPool(20, 4)
    sliding = Sliding(4, 6)
    tokens = list(range(33))
    first = SlidingTable(pool, sliding)
    first.grow(first.missing(33))
    first.commit(tokens, 32)
    blocks = list(first.ids)
    first.release()

    def lose(place):
        del pool.cached[first.digests[place]]
        pool.hashes[blocks[place]] = None

    lose(3)
    other = SlidingTable(pool, sliding)
    found = other.match(tokens)  # the token at 32 sees 27 … 32: blocks 6 and 7, and the kept block 0
    assert [block == GONE for block in found] == [False] + [True] * 5 + [False] * 2
    other.adopt(found)
    assert (other.num_held, other.num_registered, other.first) == (3, 8, 6)
    other.release()
    lose(6)
    assert len(SlidingTable(pool, sliding).match(tokens)) == 6  # blocks 4 and 5 serve the token at 24
    lose(0)
    assert SlidingTable(pool, sliding).match(tokens) == []


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (4, 1), (0, 16), (5, 17), (16, 48)])
def test_most_blocks_is_exact(size, sinks, window):
    """Reached by some length, and never exceeded by a step of one token."""
    sliding, table = Sliding(sinks, window), None
    pool = BlockPool(200, size, prefix_caching=False)
    table = SlidingTable(pool, sliding)
    most = 0
    for computed in range(150):
        table.grow(table.missing(computed + 1))
        most = max(most, table.num_held)
        table.slide(computed + 1)
    assert most == sliding.most_blocks(size)
