"""Our attention function in transformers' `AttentionInterface`, and the stand-in cache that two kinds of model need.

Registered in `AttentionInterface` only: without an entry in the mask registry transformers passes no mask. KV tensors
and metadata come as plain keyword arguments, with `cache=None`. Two kinds of model get a `StepCache` instead, which
stores nothing itself: latent attention (it expands what `update` returns), and models that derive positions from
`get_seq_length` inside attention (Llama-4's temperature tuning).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError
from .layer import AttentionLayer, Batch
from .op import active_step, attend, batch_of, gathered_backend, register_ops

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTENTION_NAME = "llmopt_paged"
LAYER_ATTRIBUTE = "llmopt_layer"
BACKEND_ATTRIBUTE = "llmopt_backend"

probing = threading.local()
"""`probing.recorder`, set by the probe: a callable that is given each attention call instead of computing it."""


def register_interface() -> str:
    """Register the attention function with transformers (idempotent); returns its name."""
    from transformers import AttentionInterface

    register_ops()
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    paged_kv: tuple[Tensor, ...] | None = None,
    paged_slots: Tensor | None = None,
    paged_cu_seqlens_q: Tensor | None = None,
    paged_seq_lens: Tensor | None = None,
    paged_block_tables: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer.

    query [1, H, T, Dk], key [1, Hkv, T or ΣK, Dk], value [1, Hkv, T or ΣK, Dv]; returns ([1, T, H, Dv], None). The
    window, soft cap and chunk are those that the probe recorded at load. Raises RunError when the model is called
    without the engine's arguments.
    """
    import torch

    compiling = torch.compiler.is_compiling()
    if not compiling:
        recorder = getattr(probing, "recorder", None)
        if recorder is not None:
            return recorder(
                module, query, key, value, attention_mask, s_aux=s_aux, paged_slots=paged_slots, **kwargs
            ), None
    if paged_kv is None or paged_slots is None:
        batch, paged_kv = (None, ()) if compiling else active_step()  # the module dropped its keyword arguments
        if batch is not None:
            paged_slots, paged_cu_seqlens_q = batch.slots, batch.cu_seqlens_q
            paged_seq_lens, paged_block_tables = batch.seq_lens, batch.block_tables
    if not paged_kv or paged_slots is None:
        raise RunError(
            "the model is set up for the paged engine and was called outside of it",
            type(module).__name__,
            "Close the engine first, or call model.set_attn_implementation('sdpa')",
        )
    layer: AttentionLayer = getattr(module, LAYER_ATTRIBUTE)
    backend: str = getattr(module, BACKEND_ATTRIBUTE)
    scale = layer.key_dim**-0.5 if scaling is None else scaling
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    where: tuple[Any, ...] = (paged_slots, paged_cu_seqlens_q, paged_seq_lens, paged_block_tables)  # all or none
    if layer.kind == "gather":
        if compiling:
            out = torch.ops.llmopt.gathered_attention(q, k, v, *where, scale, layer.window, layer.softcap, backend)
        else:
            out = gathered_backend(backend)(
                q, k, v, batch_of(*where), scale=scale, window=layer.window, softcap=layer.softcap
            )
        return out[None], None
    key_pool, value_pool = paged_kv[2 * layer.group], paged_kv[2 * layer.group + 1]
    if compiling:
        out = torch.ops.llmopt.paged_attention(
            q, k, v, key_pool, value_pool, layer.index, *where, s_aux, scale, layer.window, layer.chunk,
            layer.sink_tokens, layer.softcap, backend,
        )  # fmt: skip
    else:
        out = attend(
            q, k, v, key_pool[layer.index], value_pool[layer.index], batch_of(*where), layer,
            scale=scale, sinks=s_aux, backend=backend,
        )  # fmt: skip
    return out[None], None


class StepCache:
    """What a model gets as its `cache` for one step, where it needs one. Stores nothing: the pool does.

    offsets: int64 [T], position of each token minus its index in the flat batch; a model that adds it to
    `arange(T)` gets the true positions.
    gather_slots: int64 [ΣK], slots of every row's whole context, row after row, for latent attention.
    """

    is_compileable = False

    def __init__(
        self,
        layers: Mapping[int, AttentionLayer],
        kv: tuple[Tensor, ...],
        slots: Tensor,
        offsets: Tensor,
        gather_slots: Tensor | None,
    ) -> None:
        self.paged_layers, self.kv, self.slots = layers, kv, slots
        self.offsets, self.gather_slots = offsets, gather_slots

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Latents [1, H, T, D] of the batch in, latents [1, H, ΣK, D] of the whole contexts out; else unchanged."""
        layer = self.paged_layers[layer_idx]
        if layer.kind != "gather":
            return key, value
        key_cache, value_cache = self.kv[2 * layer.group][layer.index], self.kv[2 * layer.group + 1][layer.index]
        for new, cache in ((key, key_cache), (value, value_cache)):
            cache.flatten(0, 1).index_copy_(0, self.slots, new[0].transpose(0, 1).to(cache.dtype))
        assert self.gather_slots is not None  # given wherever a layer gathers
        keys, values = (
            cache.flatten(0, 1).index_select(0, self.gather_slots).transpose(0, 1)[None].to(key.dtype)
            for cache in (key_cache, value_cache)
        )
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.offsets


def gather_slots(batch: Batch, block_size: int) -> Tensor:
    """int64 [ΣK]: the slot of every token of every row's context, row after row."""
    import torch

    device = batch.block_tables.device
    lengths = batch.seq_lens.long()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    position = torch.arange(row.shape[0], device=device) - (lengths.cumsum(0) - lengths)[row]
    return batch.block_tables.long()[row, position // block_size] * block_size + position % block_size
