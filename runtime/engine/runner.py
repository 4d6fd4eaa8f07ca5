"""The eager runner: any transformers decoder, one flat unpadded batch a step, a paged KV pool.

The model's own modules run as they are (also quantized or fused ones); only its attention function is ours. Other
runners differ in how they call the model (`runner_compile.py`, `runner_cudagraph.py`) or do without it
(`runner_native.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError, UsageError
from ..attention.interface import ATTENTION_NAME, StepCache, gather_slots
from ..attention.op import active_batch
from ..attention.pool import KVPool
from ..attention.probe import probe_model, text_config
from ..attention.rope import freeze_rope, rope_limit, thaw_rope
from ..attention.select import AttentionChoice, choose
from ..kernels.kv_format import cache_dtype, cache_dtype_name, format_of
from .plan import Row, StepPlan
from .runner_inputs import BatchBuilder, StepTensors, to_device
from .runner_memory import blocks_for
from .runner_offload import host_blocks
from .runner_sliding import sliding_layers, sliding_note, sliding_of, useful_blocks

if TYPE_CHECKING:
    import torch

    from ..kernels.linear_dispatch import Installed
    from .runner_offload import HostBlocks, Pairs

LINEARS = ("plain", "measured", "measured-int8")
UNBOUNDED_LEN = 1 << 20
"""Length limit of a model whose configuration states none."""


def longest_request(model: Any, wanted: int | None) -> tuple[int, str]:
    """(max_model_len, a note where rotary embeddings shortened it).

    Raises UsageError where `wanted` is more than the model's positions or than its batch-wide rotary embedding allows.
    """
    config = text_config(model)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    stated = next((int(v) for n in names if (v := getattr(config, n, None))), UNBOUNDED_LEN)
    rope = rope_limit(model)
    note = ""
    if rope is not None and rope[0] < stated:
        note = f"max_model_len is {rope[0]}, not {stated}: {rope[1]} RoPE looks at the whole batch beyond it"
        stated = rope[0]
    if wanted is None:
        return stated, note
    if wanted > stated:
        why = f", where its {rope[1]} RoPE begins to look at the whole batch" if note and rope else ""
        raise UsageError(
            f"max_model_len {wanted} is more than the {stated} positions this engine can give the model{why}",
            what_to_do=f"Set max_model_len to at most {stated}" + (", or use static-batch" if note else ""),
        )
    return wanted, note


class EagerRunner:
    """Implements `ModelRunner` over a loaded transformers model (in evaluation mode, on one device).

    model: a causal language model; its parameters' dtype is the activations'.
    kv_dtype: the pool's: `auto` (the activations'), a dtype or its name, or the name of a quantized format
        (`kernels/kv_format.py`).
    kv_sinks, kv_window: a sliding cache (`sliding.py`): the first and the last tokens that are kept; window None: all.
    offload_gib: host memory for preempted requests (`offload.py`), GiB.
    block_size: tokens a block; None lets the attention backend choose.
    num_blocks, kv_cache_memory (bytes), memory_utilization: size of the pool, see `blocks_for`.
    max_model_len: longest request; None is the model's own limit.
    max_num_batched_tokens, max_num_seqs: the largest step, for the warm-up and to bound a pool nobody could fill.
    attention: `auto` or the name of a backend.
    linears: `plain` runs packed linear layers as they are (unpack, then one product); `measured` gives each the kernel
        that was measured to be fastest for its format and number of rows (`kernels/linear_choice.py`: the same numbers
        but for rounding); `measured-int8` also allows those that quantize activations to int8.
    self_check: compare a mixed step with transformers' eager attention before serving (three short forwards).

    Attributes beside the protocol's: `attention` (AttentionChoice), `kv_dtype` (its name), `notes` (what was decided at
    load, to be printed and recorded), `self_check_error` (relative error seen by the check, or None).
    Raises RunError for an architecture the engine would run wrongly, UsageError for settings that contradict.
    """

    def __init__(
        self,
        model: Any,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        attention: str = "auto",
        kv_dtype: torch.dtype | str | None = None,
        kv_sinks: int = 0,
        kv_window: int | None = None,
        offload_gib: float = 0.0,
        linears: str = "plain",
        self_check: bool = True,
    ) -> None:
        if linears not in LINEARS:
            raise UsageError(f"unknown linears {linears!r}", what_to_do=f"Use one of {', '.join(LINEARS)}.")
        self.sliding = sliding_of(kv_sinks, kv_window)
        parameter = next(p for p in model.parameters() if p.is_floating_point())
        self.model = model
        self._run = model  # what a step calls; other runners put a compiled one here
        self.device = parameter.device
        self.dtype = getattr(model, "dtype", parameter.dtype)
        self.max_model_len, note = longest_request(model, max_model_len)
        self.notes: list[str] = [note] if note else []
        self._before = model.config._attn_implementation
        self._frozen_rope: list[tuple[Any, Any]] = []
        self._pool: KVPool | None = None
        self._host: HostBlocks | None = None
        self._linears: Installed | None = None
        was_training = model.training
        model.eval()
        if was_training:
            self.notes.append("the model was in training mode and is in evaluation mode now")
        self.probe = probe_model(model)
        self.vocab_size = self.probe.vocab_size
        layers = self.probe.layers if self.sliding is None else sliding_layers(self.probe.layers, self.sliding)
        self._layers = {layer.layer_idx: layer for layer in self.probe.layers}
        self._gathers = any(layer.kind == "gather" for layer in self.probe.layers)
        pool_dtype = cache_dtype(kv_dtype, self.dtype)
        self.kv_dtype = cache_dtype_name(pool_dtype)
        fmt = format_of(pool_dtype)
        self.tail_blocks = fmt.tail_blocks if fmt else 0
        self.attention: AttentionChoice = choose(attention, layers, pool_dtype, self.device, block_size)
        self.notes.append(str(self.attention))
        self.block_size = self.attention.block_size
        try:
            self._bind()
            if linears != "plain":
                from ..kernels.linear_dispatch import install

                self._linears = install(model, linears == "measured-int8")
                self.notes += self._linears.notes
            self.num_blocks = blocks_for(
                self.probe.layers,
                self.block_size,
                pool_dtype,
                self.device,
                num_blocks=num_blocks,
                kv_cache_memory=kv_cache_memory,
                memory_utilization=memory_utilization,
                max_useful_blocks=useful_blocks(
                    self.sliding,
                    self.max_model_len,
                    self.block_size,
                    max_num_seqs,
                    max_num_batched_tokens,
                    self.tail_blocks,
                ),
                warm_up=lambda: self._warm_up(pool_dtype, max_num_batched_tokens),
            )
            self._allocate(self.num_blocks, pool_dtype)
            self._host = host_blocks(self.pool.tensors, offload_gib, self.sliding)
            self.num_host_blocks = 0 if self._host is None else self._host.count
            self.swap_seconds = 0.0 if self._host is None else self._host.seconds_per_block
            self.self_check_error: float | None = None
            if self_check:
                from .runner_check import self_check as check

                self.self_check_error = check(self)
            if self.sliding is not None:  # after the check: transformers' own attention has no such mask
                own = [layer.window for layer in self.probe.layers]
                self.notes.append(sliding_note(self.sliding, self.block_size, self.max_model_len, own))
                self.probe = replace(self.probe, layers=layers)
                self.probe.attach(self.attention.name)
            if format_of(pool_dtype) is not None:
                each = self.pool.nbytes / (self.num_blocks + 1) / self.block_size
                self.notes.append(f"KV cache {self.kv_dtype}: {each:,.0f} bytes a token")
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        """Put our attention function into the model."""
        self.probe.attach(self.attention.name)
        self.model.set_attn_implementation(ATTENTION_NAME)
        self._frozen_rope = freeze_rope(self.model)

    def _allocate(self, num_blocks: int, dtype: torch.dtype) -> None:
        self._pool = KVPool(self.probe.layers, num_blocks, self.block_size, dtype, self.device, self.attention.name)
        self._builder = BatchBuilder(self.block_size, num_blocks, fmt=format_of(dtype))

    def _warm_up(self, dtype: torch.dtype, tokens: int) -> None:
        """The largest step, over a pool that just holds it."""
        tokens = min(tokens, self.max_model_len)
        blocks = -(-tokens // self.block_size) + self.tail_blocks
        self._allocate(blocks, dtype)
        row = Row(request_id=-1, start=0, token_ids=(0,) * tokens, block_table=tuple(range(blocks)), num_logits=1)
        EagerRunner.execute(self, StepPlan((row,)))
        self._pool = None

    @property
    def pool(self) -> KVPool:
        """The KV pool. Raises RunError once the runner is closed."""
        if self._pool is None:
            raise RunError("the runner is closed", what_to_do="Load the model again")
        return self._pool

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        import torch

        pool = self.pool
        if not plan.rows:
            return torch.empty(0, self.vocab_size, device=self.device)
        arrays = self._builder.arrays(plan)
        with torch.inference_mode():  # the inputs too: views of ordinary tensors would be guarded by their base
            step = to_device(arrays, self.device)
            with active_batch(step.batch, pool.tensors):
                return self._forward(step, pool)

    def _forward(self, step: StepTensors, pool: KVPool) -> torch.Tensor:
        """float32 [num_logits, vocab_size]."""
        arguments = self._arguments(step, pool)
        wanted = step.logit_rows.shape[0]
        if self.probe.keeps_logits:
            # A linear layer over no rows is more than every quantized module takes: keep one and drop it.
            arguments["logits_to_keep"] = step.logit_rows if wanted else step.logit_rows.new_zeros(1)
            return self._run(**arguments).logits[0, :wanted].float()
        return self._run(**arguments).logits[0].index_select(0, step.logit_rows).float()

    def _arguments(self, step: StepTensors, pool: KVPool) -> dict[str, Any]:
        """What the model is called with: KV tensors and metadata are plain keywords."""
        batch = step.batch
        arguments: dict[str, Any] = {
            "input_ids": step.token_ids,
            "position_ids": step.positions,
            "use_cache": False,
            "paged_kv": pool.tensors,
            "paged_slots": batch.slots,
            "paged_cu_seqlens_q": batch.cu_seqlens_q,
            "paged_seq_lens": batch.seq_lens,
            "paged_block_tables": batch.block_tables,
        }
        if self.probe.needs_cache:
            arguments[self.probe.cache_argument] = self._step_cache(step, pool)
        return arguments

    def _step_cache(self, step: StepTensors, pool: KVPool) -> StepCache:
        import torch

        positions = step.positions[0]
        offsets = positions - torch.arange(positions.shape[0], device=positions.device)
        gathered = gather_slots(step.batch, self.block_size) if self._gathers else None
        return StepCache(self._layers, pool.tensors, step.batch.slots, offsets, gathered)

    def swap(self, out: Pairs, back: Pairs) -> None:
        """See `ModelRunner`."""
        if self._host is not None:
            self._host.swap(out, back)

    def close(self) -> None:
        """Free the pool and give the model its own attention back. Safe to call twice."""
        self._pool = self._host = None
        if self._linears is not None:
            self._linears.remove()
        if self._before is not None:
            self.probe.detach()
            thaw_rope(self._frozen_rope)
            self.model.set_attn_implementation(self._before)
            self._before = None
