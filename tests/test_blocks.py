"""The block pool against a model of it: no leak, no double free, no content under a wrong hash."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from llmopt.optimizer.errors import RunError
from llmopt.runtime.engine.blocks import BlockPool, BlockTable, chain_hash


class Tables(RuleBasedStateMachine):
    """Random requests that add, append, fork and end, with a store of tokens by slot."""

    NUM_BLOCKS, SIZE = 12, 3

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, self.SIZE)
        self.store = [None] * (self.NUM_BLOCKS * self.SIZE)
        self.live = []  # (table, tokens, computed)

    def write(self, table, tokens, start):
        for position in range(start, len(tokens)):
            block = table.ids[position // self.SIZE]
            assert self.pool.ref_counts[block] == 1, "writes a shared block"
            self.store[block * self.SIZE + position % self.SIZE] = tokens[position]

    def read(self, table, count):
        return [self.store[table.ids[p // self.SIZE] * self.SIZE + p % self.SIZE] for p in range(count)]

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def add(self, prompt):
        table = BlockTable(self.pool)
        hits = table.match(prompt)
        assert len(hits) * self.SIZE <= len(prompt) - 1, "a full hit must leave a token to run"
        revived = sum(self.pool.ref_counts[b] == 0 for b in hits)
        needed = -(-len(prompt) // self.SIZE) - len(hits)
        if needed > self.pool.num_free - revived:
            return
        table.adopt(hits)
        table.grow(needed)
        cached = len(hits) * self.SIZE
        assert self.read(table, cached) == prompt[:cached], "the prefix cache serves other tokens"
        self.write(table, prompt, cached)
        table.commit(prompt, len(prompt))
        self.live.append((table, list(prompt)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        table, tokens = data.draw(st.sampled_from(self.live))
        missing = table.missing(len(tokens) + 1)
        if missing > self.pool.num_free:
            return
        table.grow(missing)
        tokens.append(token)
        self.write(table, tokens, len(tokens) - 1)
        table.commit(tokens, len(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        table, tokens = data.draw(st.sampled_from(self.live))
        cut = data.draw(st.integers(1, len(tokens)))
        child, mine = table.fork(tokens[:cut]), tokens[:cut]
        start = child.num_registered * self.SIZE
        assert start <= cut - 1 and self.read(child, start) == mine[:start]
        if child.missing(cut) > self.pool.num_free:
            child.release()
            return
        child.grow(child.missing(cut))
        self.write(child, mine, start)
        child.commit(mine, cut)
        self.live.append((child, mine))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), extra=st.integers(1, 5))
    def reserve_and_trim(self, data, extra):
        table, tokens = data.draw(st.sampled_from(self.live))
        missing = table.missing(len(tokens) + extra)
        if missing <= self.pool.num_free:
            table.grow(missing)
            table.trim(len(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        entry = data.draw(st.sampled_from(self.live))
        self.live = [other for other in self.live if other is not entry]
        entry[0].release()

    @rule()
    def forget(self):
        self.pool.forget()

    @invariant()
    def counts_match_holders(self):
        held = [0] * self.NUM_BLOCKS
        for table, tokens in self.live:
            assert table.as_tuple() == tuple(table.ids)
            assert len(table.ids) == -(-len(tokens) // self.SIZE)
            for block in table.ids:
                held[block] += 1
        assert held == self.pool.ref_counts
        assert set(self.pool.free) == {b for b in range(self.NUM_BLOCKS) if not held[b]}

    @invariant()
    def everyone_reads_its_own_tokens(self):
        for table, tokens in self.live:
            assert self.read(table, len(tokens)) == tokens


Tables.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTables = Tables.TestCase


def test_double_free_is_an_error():
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(RunError, match="freed twice"):
        pool.release(block)


def test_an_empty_pool_is_an_error():
    pool = BlockPool(1, 4)
    pool.allocate()
    with pytest.raises(RunError, match="all 1 KV blocks are held"):
        pool.allocate()


def test_hash_depends_on_the_whole_prefix():
    first, other = chain_hash(b"", [1, 2]), chain_hash(b"", [2, 1])
    assert first != other
    assert chain_hash(first, [3, 4]) != chain_hash(other, [3, 4])


def fill(pool, tokens):
    table = BlockTable(pool)
    table.adopt(hits := table.match(tokens))
    table.grow(table.missing(len(tokens)))
    table.commit(tokens, len(tokens))
    return table, len(hits)


def test_least_recently_used_blocks_go_first_and_prefixes_outlive_their_ends():
    pool = BlockPool(4, 2)
    old, _ = fill(pool, [1, 2, 3, 4])
    new, _ = fill(pool, [5, 6, 7, 8])
    old.release()
    new.release()
    fill(pool, [9, 9])[0].release()  # takes the end of the oldest
    assert fill(pool, [1, 2, 3, 4, 0])[1] == 1
    pool = BlockPool(4, 2)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        fill(pool, tokens)[0].release()
    assert fill(pool, [1, 2, 3, 4, 0])[1] == 2


def test_a_full_hit_is_capped_below_the_last_token():
    pool = BlockPool(8, 4)
    fill(pool, list(range(8)))
    assert fill(pool, list(range(8)))[1] == 1
    assert fill(pool, list(range(9)))[1] == 2


def test_uncommitted_blocks_are_never_found():
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.grow(2)
    assert BlockTable(pool).match([1] * 9) == []
    table.commit([1] * 8, 7)  # the second block is not full yet
    assert len(BlockTable(pool).match([1] * 9)) == 1


def test_prefix_caching_can_be_off():
    pool = BlockPool(8, 4, prefix_caching=False)
    fill(pool, list(range(8)))
    assert fill(pool, list(range(9)))[1] == 0
