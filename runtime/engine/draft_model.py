"""Drafts that a model makes: a second one with a KV pool of its own, or the target's own layers in part.

A draft pass is one flat batch for all requests that draft, one pass for each depth. The draft model's pool has the
target's blocks under the target's block tables: keys and values of a block's tokens lie at the same slots in both. What
the draft model has computed of a block is remembered with the version of the block (`BlockPool.versions`), so that
prefix hits, forks and requests that come back after preemption find it, and nobody takes another text's for it.

A draft is drawn as the target will draw it: the same processing (penalties, grammar, temperature …), and the same
random number of the position. It equals what the target draws wherever the two distributions are alike, and greedy
requests draft greedily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .plan import Row, StepPlan
from .request import Request
from .sampler import next_tokens

if TYPE_CHECKING:
    import torch

    from .blocks import BlockPool

Execute = Callable[[StepPlan], "torch.Tensor"]


class Drafting:
    """Draft passes over a runner.

    execute: runs a plan. vocab_size: of the target; nothing beyond it is proposed. max_model_len: positions that the
    draft model has. max_tokens: most tokens of a draft pass; prompts that are longer are computed in pieces.
    """

    priors = (0.7,)

    def __init__(self, execute: Execute, vocab_size: int, max_model_len: int, max_tokens: int) -> None:
        self._execute, self.vocab_size = execute, vocab_size
        self.max_model_len, self._max_tokens = max_model_len, max_tokens

    def limit(self, request: Request) -> int:
        """Most drafts that the request may have now; 0 where the draft model cannot run its text."""
        return max(0, self.max_model_len - request.num_tokens)

    def behind(self, request: Request) -> int:
        """Tokens of the request that a draft pass computes before the first draft, beside its last one."""
        return max(0, request.num_tokens - 1 - self.first(request))

    def first(self, request: Request) -> int:
        """Tokens of the request whose keys and values the draft pass finds."""
        raise NotImplementedError

    def written(self, request: Request, end: int) -> None:
        """A draft pass has written keys and values of the request's first `end` tokens, drafts included."""

    def draft(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Drafts of at most the lengths given. The blocks of `num_tokens + length - 1` tokens must be in the tables.

        Requests whose text the draft model has not caught up with get none, and get on with it.
        """
        drafts: list[list[int]] = [[] for _ in requests]
        first = self._catch_up(requests, lengths)
        tokens = self._run([row for _, row in first], [(requests[i], ()) for i, row in first if row.num_logits])
        active = [i for i, row in first if row.num_logits]
        for depth in range(1, max((lengths[i] for i in active), default=0) + 1):
            if depth > 1:
                active = [i for i in active if len(drafts[i]) == depth - 1 and lengths[i] >= depth]
                if not active:
                    break
                rows = [self._row(requests[i], requests[i].num_tokens + depth - 2, drafts[i][-1:]) for i in active]
                tokens = self._run(rows, [(requests[i], tuple(drafts[i])) for i in active])
            for i, token in zip(active, tokens):
                if token >= 0:
                    drafts[i].append(token)
                if token in requests[i].stop_ids:  # nothing comes after it
                    active = [j for j in active if j != i]
        for i, row in first:
            end = row.end + max(0, len(drafts[i]) - 1) if row.num_logits else row.end
            self.written(requests[i], end)
        return [tuple(found) for found in drafts]

    def _catch_up(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[tuple[int, Row]]:
        """Rows up to each request's last token, as far as the pass has room, with the request's number.

        No two write one block: of requests that share a prefix the first computes it and the others wait.
        """
        rows: list[tuple[int, Row]] = []
        room, taken = self._max_tokens, set[int]()
        for i, (request, length) in enumerate(zip(requests, lengths)):
            start, end = self.first(request), request.num_tokens
            if length < 1 or room < 1:
                continue
            stop = min(end, start + room)
            row = self._row(request, start, request.token_ids[start:stop], logits=int(stop == end))
            size = request.table.pool.block_size
            touched = set(row.block_table[start // size :])
            if touched & taken:
                continue
            taken |= touched
            rows.append((i, row))
            room -= len(row.token_ids)
        return rows

    def _row(self, request: Request, start: int, tokens: Sequence[int], logits: int = 1) -> Row:
        end = start + len(tokens)
        pool = request.table.pool
        blocks = request.table.as_tuple()[: -(-end // pool.block_size) + pool.tail_blocks]
        return Row(request.id, start, tuple(tokens), blocks, logits)

    def _run(self, rows: Sequence[Row], places: Sequence[tuple[Request, tuple[int, ...]]]) -> list[int]:
        """One pass; the drafts that follow the places (a request and its drafts so far), -1 for none."""
        if not rows:
            return []
        logits = self._execute(StepPlan(tuple(rows)))
        return next_tokens(fit(logits, self.vocab_size), places) if places else []

    def observe(self, request: Request, num_accepted: int) -> None:
        """Of the drafts so many were accepted; the accepted tokens are not in `request.token_ids` yet."""

    def forget(self, request: Request) -> None:
        """The request has ended."""

    def close(self) -> None:
        """Free what belongs to the drafts alone."""


def fit(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [N, V] cut or filled with -inf to the target's vocabulary: paddings of one vocabulary differ."""
    import torch

    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


class OwnLayers(Drafting):
    """The target's own layers in part, with its head: what was computed for the text is shared, keys and values too.

    Draft passes write the keys and values of their layers; the verification writes all of them again.
    """

    priors = (0.6,)

    def first(self, request: Request) -> int:
        return request.num_computed


@dataclass
class _Progress:
    """How far the draft model is with a request."""

    preemptions: int
    valid: int
    """Tokens whose keys and values are right, counted from the first."""
    written: int = 0
    """The same if all drafts are accepted."""


class SecondModel(Drafting):
    """A second model's runner, with the target's number of blocks and their size.

    runner: a ModelRunner; vocab_size: the target's.
    """

    def __init__(self, runner: Any, vocab_size: int, max_tokens: int) -> None:
        super().__init__(runner.execute, vocab_size, runner.max_model_len, max_tokens)
        self.runner = runner
        self._progress: dict[int, _Progress] = {}
        self._pool: BlockPool | None = None
        self._complete: dict[int, int] = {}
        """Block → version of it that the draft model has computed in full."""
        self._checked: dict[int, int] = {}
        """Request → tokens of it that the draft model knows; -1 where there is one that it does not."""

    def limit(self, request: Request) -> int:
        """As above; 0 also for a text with ids that only the target has, or whose beginning is gone from the tables
        (a sliding cache) before the draft model has computed it."""
        if self.first(request) < request.table.readable_from:
            return 0
        own = self.runner.vocab_size
        if own < self.vocab_size:
            checked = self._checked.get(request.id, 0)
            if checked < 0 or any(token >= own for token in request.token_ids[checked:]):
                self._checked[request.id] = -1
                return 0
            self._checked[request.id] = request.num_tokens
        return super().limit(request)

    def first(self, request: Request) -> int:
        table = request.table
        if table.pool is not self._pool:
            self._pool, self._complete, self._progress = table.pool, {}, {}
        known = self._progress.get(request.id)
        if known is None or known.preemptions != request.num_preemptions:
            versions, blocks = table.pool.versions, 0
            for block in table.ids[: (request.num_tokens - 1) // table.pool.block_size]:
                if self._complete.get(block) != versions[block]:
                    break
                blocks += 1
            known = _Progress(request.num_preemptions, blocks * table.pool.block_size)
            self._progress[request.id] = known
        return min(known.valid, request.num_tokens - 1)

    def written(self, request: Request, end: int) -> None:
        known = self._progress[request.id]
        known.written = end
        self._advance(request, known, min(end, request.num_tokens))

    def observe(self, request: Request, num_accepted: int) -> None:
        known = self._progress.get(request.id)
        if known is not None and known.preemptions == request.num_preemptions:
            self._advance(request, known, max(known.valid, min(known.written, request.num_tokens + num_accepted)))

    def forget(self, request: Request) -> None:
        self._progress.pop(request.id, None)
        self._checked.pop(request.id, None)

    def close(self) -> None:
        self.runner.close()

    def _advance(self, request: Request, known: _Progress, valid: int) -> None:
        """Note the blocks that are full of the request's own tokens (drafts may be taken back)."""
        size, table = request.table.pool.block_size, request.table
        for place in range(known.valid // size, valid // size):
            block = table.ids[place]
            self._complete[block] = table.pool.versions[block]
        known.valid = valid
