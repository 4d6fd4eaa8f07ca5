"""The KV pool's blocks: reference counts, prefix reuse, and each request's block table. Pure Python, no tensors.

A block is free (reference count 0) or held. A held block has at most one writer: only full, committed blocks are ever
shared, and those are never written again. Fork is therefore copy-on-write without a copy: the child shares the parent's
full blocks and recomputes the few tokens of the partial one. A free block keeps its content and its hash until it is
handed out again, least recently used first, so that a later request with the same prefix can take it back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct, pack

from ...optimizer.errors import RunError

_ROOT = b"llmopt"


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block, given its predecessor's (16 bytes of BLAKE2b: a collision would serve another's text)."""
    return blake2b(parent + pack(f"{len(token_ids)}i", *token_ids), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. With `prefix_caching=False` nothing is ever matched.

    tail_blocks: blocks that every table has beyond those of its tokens, for the runner's own use
    (`ModelRunner.tail_blocks`).
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True, tail_blocks: int = 0) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.tail_blocks = tail_blocks
        self.pack = Struct(f"{block_size}i").pack
        """A block's token ids as bytes, 32 bits each: with the parent's hash they are one block of BLAKE2b, not two."""
        self.ref_counts = [0] * num_blocks
        self.versions = [0] * num_blocks
        """How often each block was handed out: what is known of a block's content holds for one version of it."""
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.cached: dict[bytes, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """Blocks with reference count 0, next to be handed out first."""

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self) -> int:
        """A block with reference count 1 and no hash. Raises `RunError` if none is free: ask `num_free` first."""
        if not self.free:
            raise RunError(f"all {self.num_blocks} KV blocks are held", where="block pool")
        block, _ = self.free.popitem(last=False)
        digest = self.hashes[block]
        if digest is not None:
            self.hashes[block] = None
            del self.cached[digest]
        self.ref_counts[block] = 1
        self.versions[block] += 1
        return block

    def acquire(self, block: int) -> None:
        """One more reader of a block that `match` has found or that another table holds."""
        if self.ref_counts[block] == 0:
            del self.free[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Give one reference back. Raises `RunError` on a double free."""
        count = self.ref_counts[block]
        if count <= 0:
            raise RunError(f"block {block} is freed twice", where="block pool")
        self.ref_counts[block] = count - 1
        if count == 1:
            self.free[block] = None
            if self.hashes[block] is None:
                self.free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes) -> None:
        """Offer a full, committed block for reuse. A twin that is already offered stays the one that is found."""
        if self.prefix_caching and digest not in self.cached:
            self.cached[digest] = block
            self.hashes[block] = digest

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `digests`, not yet acquired."""
        found: list[int] = []
        for digest in digests:
            block = self.cached.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def forget(self) -> None:
        """Drop every hash: no content that is in the pool now is reused."""
        self.cached.clear()
        self.hashes = [None] * self.num_blocks


class BlockTable:
    """One request's blocks, in the order of its positions."""

    __slots__ = ("blocks", "digests", "ids", "num_registered", "pool")

    readable_from = 0
    """All blocks of the positions from here on are there; earlier ones may be gone (`sliding.py`)."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.ids: list[int] = []
        self.digests: list[bytes] = []
        """Chained hashes of the request's first full blocks of tokens, computed or not."""
        self.num_registered = 0
        """Leading blocks that are committed, hence read-only."""
        self.blocks: tuple[int, ...] | None = None
        """The same as a tuple; None where it is to be made: ask `as_tuple`."""

    def as_tuple(self) -> tuple[int, ...]:
        blocks = self.blocks
        if blocks is None:
            blocks = self.blocks = tuple(self.ids)
        return blocks

    def missing(self, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` tokens, and the tail, fit (≤ 0: they fit)."""
        return -(-num_tokens // self.pool.block_size) + self.pool.tail_blocks - len(self.ids)

    def grow(self, count: int) -> None:
        if count > 0:
            new = (self.pool.allocate(),) if count == 1 else tuple([self.pool.allocate() for _ in range(count)])
            self.ids += new
            if self.blocks is not None:
                self.blocks += new

    def trim(self, num_tokens: int) -> None:
        """Give back the blocks beyond those that `num_tokens` tokens need (drafts that were rejected)."""
        keep = -(-num_tokens // self.pool.block_size) + self.pool.tail_blocks
        if len(self.ids) > keep:
            for block in reversed(self.ids[keep:]):
                self.pool.release(block)
            del self.ids[keep:]
            self.blocks = None

    def extend_digests(self, token_ids: Sequence[int], num_tokens: int) -> None:
        size, digests = self.pool.block_size, self.digests
        for i in range(len(digests), num_tokens // size):
            digests.append(chain_hash(digests[-1] if digests else _ROOT, token_ids[i * size : (i + 1) * size]))

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Cached blocks for the request's tokens, at most those of its first `len(token_ids) - 1` tokens: at least one
        token must be run for there to be logits."""
        if not self.pool.prefix_caching:
            return []
        limit = max(0, len(token_ids) - 1)
        self.extend_digests(token_ids, limit)
        return self.pool.match(self.digests[: limit // self.pool.block_size])

    def adopt(self, blocks: Sequence[int]) -> None:
        """Start an empty table with committed blocks (a prefix hit, or a fork)."""
        for block in blocks:
            self.pool.acquire(block)
        self.ids = list(blocks)
        self.num_registered = len(blocks)
        self.blocks = None

    def fork(self, token_ids: Sequence[int]) -> BlockTable:
        """A table for a request that continues `token_ids`, sharing this table's committed full blocks of them."""
        child = BlockTable(self.pool)
        limit = max(0, len(token_ids) - 1) // self.pool.block_size
        shared = min(self.num_registered, limit)
        child.digests = self.digests[:shared]
        child.adopt(self.ids[:shared])
        return child

    def commit(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Register the blocks that the first `num_computed` tokens fill. Call only after their step has succeeded."""
        pool, first = self.pool, self.num_registered
        size = pool.block_size
        full = num_computed // size
        if full <= first:
            return
        self.num_registered = full
        if not pool.prefix_caching:
            return
        digests, ids, cached = self.digests, self.ids, pool.cached
        known = len(digests)
        parent = digests[known - 1] if known else _ROOT
        for i in range(first, full):
            if i < known:
                digest = digests[i]
            else:
                inside = pool.pack(*token_ids[i * size : (i + 1) * size])
                digest = parent = blake2b(parent + inside, digest_size=16).digest()
                digests.append(digest)
            if digest not in cached:  # as `BlockPool.register` does it
                cached[digest] = ids[i]
                pool.hashes[ids[i]] = digest

    def release(self) -> None:
        """Give every block back, the last first, so that the beginnings of prefixes live longest."""
        for block in reversed(self.ids):
            self.pool.release(block)
        self.ids = []
        self.num_registered = 0
        self.blocks = None
