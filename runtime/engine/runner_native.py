"""The native runner: one C++ call a step over a fused, packed copy of the model (`runtime/kernels/decoder.py`, CPU).

For Llama-like models that the kernels recognize; everything else runs on `EagerRunner`. Python's share of a step is the
laying out of a few int32 arrays: plans of single tokens (decode) go through lists, longer rows through numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from ...optimizer.errors import RunError, UsageError
from ..kernels.kv_format import cache_dtype, cache_dtype_name, format_of
from .plan import Row, StepPlan
from .runner import longest_request
from .runner_inputs import BatchBuilder
from .runner_memory import DEFAULT_CPU_BYTES
from .runner_offload import host_blocks
from .runner_sliding import reach, sliding_note, sliding_of, useful_blocks

if TYPE_CHECKING:
    import torch

    from ..kernels.decoder import FusedDecoder, StepArrays
    from .runner_offload import Pairs

LIST_ROWS = 16
"""Most rows of a decode plan that plain lists lay out faster than numpy does."""


def one_by_one(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows with each draft as a row of its own, over the same blocks.

    A token that is a sequence's only new one is summed in the order that torch takes for one token, which rounds
    otherwise than its order for several: so a draft is verified with the bits that plain decoding would have.
    """
    for row in rows:
        first = len(row.token_ids) - row.num_drafts
        yield row._replace(token_ids=row.token_ids[:first], num_logits=row.num_logits - row.num_drafts, num_drafts=0)
        for i in range(first, len(row.token_ids)):
            yield Row(row.request_id, row.start + i, row.token_ids[i : i + 1], row.block_table, 1)


@runtime_checkable
class DecoderSource(Protocol):
    """What a fused decoder can be built from beside a torch module."""

    def longest_request(self, wanted: int | None) -> tuple[int, str]:
        """See `runner.longest_request`."""
        ...

    def build_decoder(self, **options: Any) -> FusedDecoder:
        """The decoder, proved; the options are those of `kernels.decoder.build_decoder`."""
        ...


class _ModuleSource:
    """A transformers model as DecoderSource."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    def longest_request(self, wanted: int | None) -> tuple[int, str]:
        return longest_request(self.model, wanted)

    def build_decoder(self, **options: Any) -> FusedDecoder:
        from ..kernels.decoder import build_decoder

        return build_decoder(self.model, **options)


class NativeRunner:
    """Implements `ModelRunner` with the fused decoder.

    model: a causal language model on the CPU, or a DecoderSource.

    activation, weights, lm_head, rounding, num_threads, release: see `kernels.decoder.build_decoder`. self_check: its
    `prove`.
    kv_sinks, kv_window: a sliding cache (`sliding.py`): the first and the last tokens that are kept; window None: all.
        `rounding="auto"` is then `none`, too.
    offload_gib: host memory beside the pool for preempted requests (`offload.py`), GiB.
    block_size: a multiple of 32. num_blocks, or else kv_cache_memory (bytes; 1 GiB where neither is given), sizes the
    pool; never more than `max_num_seqs` requests of `max_model_len` could fill.
    kv_dtype: `auto` (float32 for a float32 model, else bfloat16), `bfloat16`, `float32`, or the name of a quantized
        format (`kernels/kv_format.py`). With one of those `rounding="auto"` is `none`: transformers' bits are out of
        reach, and float32 between the products is nearer to the float32 model.

    Attributes beside the protocol's: `decoder`, `notes`, `kv_dtype` (its name), `self_check_error` (the proof's
    relative error, or None).
    Raises what `build_decoder` does (UnsupportedModel, NativeUnavailable), UsageError for settings that contradict.
    """

    def __init__(
        self,
        model: Any,
        *,
        activation: str = "none",
        weights: str = "stored",
        lm_head: str = "stored",
        rounding: str = "auto",
        num_threads: int | None = None,
        release: bool = False,
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        kv_dtype: torch.dtype | str | None = None,
        kv_sinks: int = 0,
        kv_window: int | None = None,
        offload_gib: float = 0.0,
        self_check: bool = True,
    ) -> None:
        import torch

        quantized = format_of(cache_dtype(kv_dtype, torch.bfloat16)) is not None
        self.sliding = sliding_of(kv_sinks, kv_window)
        if (quantized or self.sliding is not None) and rounding == "auto":
            rounding = "none"
        self.block_size = block_size or 32
        if self.block_size % 32:
            raise UsageError(f"the native cache takes blocks of a multiple of 32 tokens, not {self.block_size}")
        source: DecoderSource = model if isinstance(model, DecoderSource) else _ModuleSource(model)
        self.max_model_len, note = source.longest_request(max_model_len)
        self.notes: list[str] = [note] if note else []
        self.decoder = source.build_decoder(
            activation=activation,
            weights=weights,
            lm_head=lm_head,
            rounding=rounding,
            num_threads=num_threads,
            release=release,
            prove=self_check,
        )
        self.device = torch.device("cpu")
        self.vocab_size = self.decoder.vocab_size
        proof = self.decoder.proof
        self.self_check_error = None if proof is None else proof.relative_error
        self.dtype = self.decoder.structure.dtype
        own = torch.float32 if self.dtype == torch.float32 else torch.bfloat16
        dtype = cache_dtype(kv_dtype, own)
        self.kv_dtype = cache_dtype_name(dtype)
        fmt = format_of(dtype)
        self.tail_blocks = fmt.tail_blocks if fmt else 0
        self.num_blocks = num_blocks or self._blocks(kv_cache_memory, dtype, max_num_seqs, max_num_batched_tokens)
        cache_bytes = self.decoder.allocate_kv(self.num_blocks, self.block_size, dtype)
        formats = ", ".join(f"{n} × {name}" for name, n in sorted(self.decoder.linear_formats.items()))
        self.notes.append(
            f"fused native decoder: linears {formats}; {self.decoder.weight_bytes / 2**20:.0f} MiB of packed weights; "
            f"{self.num_blocks} blocks of {self.block_size} tokens, {cache_bytes / 2**20:.0f} MiB at most"
        )
        if quantized:
            self.notes.append(
                f"KV cache {self.kv_dtype}: {cache_bytes / self.num_blocks / self.block_size:,.0f} bytes a token; "
                "attention does not follow torch's order of sums"
            )
        if self.sliding is not None:  # after the decoder's proof: transformers' own attention has no such mask
            windows = [layer.window for layer in self.decoder.structure.layers]
            for number, window in enumerate(windows):
                self.decoder.set_window(number, *reach(window, self.sliding))
            self.notes.append(sliding_note(self.sliding, self.block_size, self.max_model_len, windows))
        self._host = host_blocks(self.decoder.kv_cache, offload_gib, self.sliding)
        self.num_host_blocks = 0 if self._host is None else self._host.count
        self.swap_seconds = 0.0 if self._host is None else self._host.seconds_per_block
        self._builder = BatchBuilder(self.block_size, self.num_blocks, fmt=fmt)
        self._logits = torch.empty(0, self.vocab_size)
        self._closed = False

    def _blocks(self, budget: int | None, dtype: torch.dtype, max_num_seqs: int, step: int) -> int:
        from ..kernels.attention import block_bytes

        decoder = self.decoder
        per_block = decoder.num_layers * block_bytes(self.block_size, decoder.num_kv_heads, decoder.head_dim, dtype)
        budget = DEFAULT_CPU_BYTES if budget is None else budget
        useful = useful_blocks(self.sliding, self.max_model_len, self.block_size, max_num_seqs, step, self.tail_blocks)
        blocks = min(budget // per_block, useful)
        if blocks < 1 + self.tail_blocks:
            raise RunError(
                f"a KV budget of {budget / 2**20:.1f} MiB holds no block of {self.block_size} tokens "
                f"({per_block / 2**20:.2f} MiB)",
                what_to_do="Raise kv_cache_memory",
            )
        return int(blocks)

    def execute(self, plan: StepPlan, layers: torch.Tensor | None = None) -> torch.Tensor:
        """See `ModelRunner.execute`. The logits are a view of a buffer that the next call overwrites.

        layers: int32, ascending: run only these, then the head.
        """
        import torch

        if self._closed:
            raise RunError("the runner is closed", what_to_do="Load the model again")
        if self.decoder.rounds and any(row.num_drafts for row in plan.rows):
            plan = StepPlan(tuple(one_by_one(plan.rows)))
        rows = plan.rows
        wanted = plan.num_logits
        if self._logits.shape[0] < wanted:
            self._logits = torch.empty(wanted, self.vocab_size)
        if not rows:
            return self._logits[:0]
        if len(rows) <= LIST_ROWS and all(len(row.token_ids) == 1 for row in rows):
            arguments = self._decode_arrays(plan)
        else:
            a = self._builder.arrays(plan)
            ids, positions, slots, logit_rows = (
                torch.from_numpy(x.astype(np.int32)) for x in (a.token_ids, a.positions, a.slots, a.logit_rows)
            )
            starts, lengths, tables = (torch.from_numpy(x) for x in (a.cu_seqlens_q, a.seq_lens, a.block_tables))
            arguments = ids, positions, slots, starts, lengths, tables, logit_rows
        return self.decoder.forward(*arguments, out=self._logits[:wanted], layers=layers)

    def _decode_arrays(self, plan: StepPlan) -> StepArrays:
        """The decoder's seven arguments for rows of one token, as views of one int32 array."""
        import torch

        rows, size, count = plan.rows, self.block_size, len(plan.rows)
        if self.tail_blocks:
            self._builder.check_tails(rows)
        tables = [self._builder.table(row) for row in rows]
        width = max(map(len, tables))
        flat: list[int] = [row.token_ids[0] for row in rows]
        flat += [row.start for row in rows]
        try:
            flat += [row.block_table[row.start // size] * size + row.start % size for row in rows]
        except IndexError:
            self._builder.arrays(plan)  # names the row at fault
            raise
        flat += range(count + 1)
        flat += [row.start + 1 for row in rows]
        flat += [i for i, row in enumerate(rows) if row.num_logits]
        head = len(flat)
        packed = np.empty(head + count * width, np.int32)
        packed[:head] = flat
        block_tables = packed[head:].reshape(count, width)
        for i, table in enumerate(tables):
            block_tables[i, : len(table)] = table
            block_tables[i, len(table) :] = 0
        whole = torch.from_numpy(packed)
        ids, positions, slots, starts, lengths, logit_rows, _ = whole.split(
            [count, count, count, count + 1, count, head - 5 * count - 1, count * width]
        )
        return ids, positions, slots, starts, lengths, torch.from_numpy(block_tables), logit_rows

    def swap(self, out: Pairs, back: Pairs) -> None:
        """See `ModelRunner`."""
        if self._host is not None:
            self._host.swap(out, back)

    def close(self) -> None:
        """Free the KV pool. Safe to call twice; the packed weights go with the last reference to the runner."""
        if not self._closed:
            self._closed = True
            self._host = None
            self.decoder.drop_kv()
            self._logits = self._logits[:0].clone()
