"""`llmopt::paged_attention` and `llmopt::gathered_attention`: the two operators that a model's graph sees.

Each is one `torch.library.custom_op`, so that `torch.compile(fullgraph=True)` holds over any model; the backend behind
it is named by an argument. Eager runners call `attend` directly and save the operator's dispatch. Registered on first
use by `register_ops`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError
from ..kernels import kv_format
from ..kernels.kv_format import format_of
from .exact_keys import by_channel, write_keys
from .layer import AttentionLayer, Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAGED_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, int layer, Tensor slots, "
    "Tensor cu_seqlens_q, Tensor seq_lens, Tensor block_tables, Tensor? sinks, float scale, int window, int chunk, "
    "int sink_tokens, float softcap, str backend) -> Tensor"
)
GATHERED_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor slots, Tensor cu_seqlens_q, Tensor seq_lens, "
    "Tensor block_tables, float scale, int window, float softcap, str backend) -> Tensor"
)

_active = threading.local()


@contextlib.contextmanager
def active_batch(batch: Batch, kv: tuple[Tensor, ...] = ()) -> Iterator[Batch]:
    """Tell the operators, for the forward inside, which `Batch` their tensors belong to, and the pool's tensors.

    They then share what a backend derives from it over all layers, and know `max_q` and `max_k` without reading them
    back from the device. Without it everything is derived anew in each call. Modules that drop keyword arguments on
    the way to their attention function (OPT, StableLM) find both here.
    """
    before = getattr(_active, "batch", None), getattr(_active, "kv", ())
    _active.batch, _active.kv = batch, kv
    try:
        yield batch
    finally:
        _active.batch, _active.kv = before


def active_step() -> tuple[Batch | None, tuple[Tensor, ...]]:
    """The innermost `active_batch` of this thread: (batch, pool tensors), or (None, ())."""
    return getattr(_active, "batch", None), getattr(_active, "kv", ())


def batch_of(slots: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, block_tables: Tensor) -> Batch:
    """The active batch where these tensors are its own, else one derived from them."""
    batch = getattr(_active, "batch", None)
    if (
        batch is not None
        and batch.slots.data_ptr() == slots.data_ptr()
        and batch.block_tables.data_ptr() == block_tables.data_ptr()
        and batch.block_tables.shape == block_tables.shape
    ):
        return batch
    max_q = int(cu_seqlens_q.diff().max()) if seq_lens.numel() else 0
    return Batch(slots, cu_seqlens_q, seq_lens, block_tables, max_q, int(seq_lens.max()) if seq_lens.numel() else 0)


@cache
def paged_backend(name: str) -> Callable[..., Tensor]:
    """The function of a backend: (query, key_cache, value_cache, batch, *, scale, window, …) → out. With keys by
    channel also new_keys [T, H, Dk], the step's own: blocks that it fills are read as they are by their own tokens.

    `invariant:` before a name attends each sequence in a call of its own. Raises RunError for a name that is not a
    backend, and what its import raises where its library is absent.
    """
    if name.startswith(INVARIANT):
        return partial(_one_by_one, paged_backend(name.removeprefix(INVARIANT)))
    function: Callable[..., Tensor]
    if name == "reference":
        from .reference import paged_attention_reference as function
    elif name == "torch":
        from .cpu import paged_attention_torch as function
    elif name == "compiled":
        from .compiled import paged_attention_compiled as function
    elif name == "varlen":
        from .varlen import paged_attention_varlen as function
    elif name == "flash_attn":
        from .varlen import paged_attention_flash_attn as function
    elif name == "triton":
        from .triton_paged import paged_attention_triton as function
    else:
        raise RunError(f"unknown attention backend {name!r}", what_to_do=f"Use one of: {', '.join(BACKENDS)}")
    return function


BACKENDS = ("reference", "torch", "compiled", "varlen", "flash_attn", "triton")
"""Every backend by its name; `select.py` says which of them run where."""


INVARIANT = "invariant:"


def _one_by_one(
    function: Callable[..., Tensor],
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    *,
    new_keys: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """A backend's function called once a sequence: how it splits its work then depends on that sequence alone."""
    import torch

    if "one_by_one" not in batch.memo:
        bounds = batch.query_bounds
        batch.memo["one_by_one"] = [
            Batch(
                batch.slots[first:last],
                batch.cu_seqlens_q[row : row + 2] - first,
                batch.seq_lens[row : row + 1],
                batch.block_tables[row : row + 1],
                last - first,
                batch.lengths[row],
            )
            for row, (first, last) in enumerate(pairwise(bounds))
        ]
    parts = batch.memo["one_by_one"]
    spans = batch.query_bounds
    return torch.cat(
        [
            function(
                query[spans[row] : spans[row + 1]],
                key_cache,
                value_cache,
                part,
                **({} if new_keys is None else {"new_keys": new_keys[spans[row] : spans[row + 1]]}),
                **options,
            )
            for row, part in enumerate(parts)
        ]
    )


@cache
def gathered_backend(name: str) -> Callable[..., Tensor]:
    """The function for latent attention over gathered keys; backends without one of their own use torch's operators."""
    if name == "reference":
        from .reference import gathered_attention_reference as function
    else:
        from .cpu import gathered_attention_torch as function
    return function


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: Batch) -> None:
    """key [T, H, Dk] and value [T, H, Dv] of a step into caches [N, B, H, D], quantized as their dtype says."""
    fmt, slots = format_of(key_cache.dtype), batch.slots
    if fmt is not None:
        if fmt.by_channel:
            write_keys(key, key_cache, value_cache, batch)
        else:
            kv_format.write(key, key_cache, slots, fmt)
        kv_format.write(value, value_cache, slots, fmt)
        return
    key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))


@cache
def cache_writer(name: str) -> Callable[[Tensor, Tensor, Tensor, Tensor, Batch], None]:
    """How a backend's pool is written: (key, value, key_cache, value_cache, batch)."""
    if name.removeprefix(INVARIANT) == "compiled":
        from .compiled import write_kv_compiled

        return write_kv_compiled
    return write_kv


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: Batch,
    layer: AttentionLayer,
    *,
    scale: float,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    """Write one layer's new keys and values into the pool, then attend. query [T, H, Dk] → [T, H, Dv]."""
    cache_writer(backend)(key, value, key_cache, value_cache, batch)
    return paged_backend(backend)(
        query,
        key_cache,
        value_cache,
        batch,
        **({"new_keys": key} if by_channel(key_cache.dtype) else {}),
        scale=scale,
        window=layer.window,
        chunk=layer.chunk,
        sink_tokens=layer.sink_tokens,
        softcap=layer.softcap,
        sinks=sinks,
    )


@lru_cache(maxsize=1)
def register_ops() -> Any:
    """Define the operators (once a process) and return their namespace `torch.ops.llmopt`."""
    import torch

    def paged_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        window: int,
        chunk: int,
        sink_tokens: int,
        softcap: float,
        backend: str,
    ) -> torch.Tensor:
        batch = batch_of(slots, cu_seqlens_q, seq_lens, block_tables)
        key_cache, value_cache = key_pool[layer], value_pool[layer]
        cache_writer(backend)(key, value, key_cache, value_cache, batch)
        return paged_backend(backend)(
            query,
            key_cache,
            value_cache,
            batch,
            **({"new_keys": key} if by_channel(key_cache.dtype) else {}),
            scale=scale,
            window=window,
            chunk=chunk,
            sink_tokens=sink_tokens,
            softcap=softcap,
            sinks=sinks,
        )

    def gathered_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        backend: str,
    ) -> torch.Tensor:
        batch = batch_of(slots, cu_seqlens_q, seq_lens, block_tables)
        return gathered_backend(backend)(query, key, value, batch, scale=scale, window=window, softcap=softcap)

    paged = torch.library.custom_op(
        "llmopt::paged_attention", paged_attention, mutates_args=("key_pool", "value_pool"), schema=PAGED_SCHEMA
    )
    gathered = torch.library.custom_op(
        "llmopt::gathered_attention", gathered_attention, mutates_args=(), schema=GATHERED_SCHEMA
    )

    @paged.register_fake
    def _(query, key, value, *args):  # type: ignore[no-untyped-def]
        return query.new_empty(query.shape[0], query.shape[1], value.shape[-1])

    @gathered.register_fake
    def _(query, key, value, *args):  # type: ignore[no-untyped-def]
        return query.new_empty(query.shape[0], query.shape[1], value.shape[-1])

    return torch.ops.llmopt
