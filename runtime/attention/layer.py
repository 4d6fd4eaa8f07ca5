"""What an attention layer is, and what one step's batch looks like to it.

`AttentionLayer` is fixed at load, `Batch` is made anew for every step. Both are plain data; the backends are functions
of tensors and of these two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

LayerKind = Literal["paged", "gather"]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model, as the probe saw it being called.

    kind: `paged` keeps per-head keys and values in the pool and reads them through block tables. `gather` is
        multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the pool keeps the compressed latents, and the
        model expands the gathered ones before it attends.
    num_heads, num_kv_heads, key_dim, value_dim: shape of the attention itself.
    cache_heads, cache_key_dim, cache_value_dim: shape of what a token leaves in the pool.
    window: tokens a query sees, its own included (0: all); `sliding_attention`.
    chunk: queries see only keys of their own chunk of this many positions (0: all); Llama-4's `chunked_attention`.
    sink_tokens: first tokens of the request that stay visible outside the window (StreamingLLM, arXiv:2309.17453).
    index: position of the layer inside its group of the pool; `group` is the group's number.
    """

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    kind: LayerKind = "paged"
    cache_heads: int = 0
    cache_key_dim: int = 0
    cache_value_dim: int = 0
    window: int = 0
    chunk: int = 0
    sink_tokens: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    group: int = 0
    index: int = 0

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(heads, key dim, value dim) of a token in the pool."""
        return self.cache_heads, self.cache_key_dim, self.cache_value_dim


@dataclass
class Batch:
    """One flat batch of `T` tokens in `S` sequences, in the form every backend reads.

    slots: int64 [T], where each token's keys and values go: block number * block_size + offset.
    cu_seqlens_q: int32 [S + 1], the rows' borders in the flat batch.
    seq_lens: int32 [S], tokens of the sequence after this step, those of the batch included.
    block_tables: int32 [S, W], block numbers; entries beyond a sequence's last block are ignored (they are 0).
    max_q, max_k: longest row and longest sequence; upper bounds are allowed (captured graphs).
    memo: what backends derive from the above, once a step instead of once a layer.
    """

    slots: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    max_q: int
    max_k: int
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def query_bounds(self) -> list[int]:
        """`cu_seqlens_q` as Python integers (read once a step)."""
        if "query_bounds" not in self.memo:
            self.memo["query_bounds"] = self.cu_seqlens_q.tolist()
        return self.memo["query_bounds"]

    @property
    def lengths(self) -> list[int]:
        """`seq_lens` as Python integers (read once a step)."""
        if "lengths" not in self.memo:
            self.memo["lengths"] = self.seq_lens.tolist()
        return self.memo["lengths"]


def visible(
    query_positions: torch.Tensor, key_positions: torch.Tensor, window: int, chunk: int, sink_tokens: int
) -> torch.Tensor:
    """Boolean [..., q, k]: which keys each query sees. Positions are int64 [..., q] and [..., k] within the request.

    Causal; `window`, `chunk` and `sink_tokens` as in `AttentionLayer`.
    """
    q, k = query_positions[..., :, None], key_positions[..., None, :]
    mask = k <= q
    if window:
        inside = k > q - window
        if sink_tokens:
            inside = inside | (k < sink_tokens)
        mask = mask & inside
    if chunk:
        mask = mask & (k // chunk == q // chunk)
    return mask
