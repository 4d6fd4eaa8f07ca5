"""Pass `kv_cache`: how the runtime stores keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from ..optimizer.base import Context, Options, Pass, PassReport, PlanItem
from ..optimizer.errors import RunError
from ..optimizer.runtime_spec import KVCacheDtype, KVCacheKind, KVCacheSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..optimizer.model import LoadedModel, ModelInfo

BLOCKS: tuple[KVCacheKind, ...] = ("paged", "sliding", "offloaded")
"""Kinds that the engine keeps in blocks, which may be quantized."""
RUNS_HERE: tuple[KVCacheKind, ...] = ("dynamic", *BLOCKS)
"""Kinds that the runtime of this version can run."""


class KVCache(Pass):
    """Records the KV cache's kind, element type and block size in the RuntimeSpec; changes no weights."""

    name = "kv_cache"
    changes_weights: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"kv_cache"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"kv_cache"})

    class Config(Options):
        kind: KVCacheKind = Field(
            "paged",
            description="`paged`: blocks shared between requests (the engine's cache); `dynamic`: one growing tensor a "
            "layer; `static`: preallocated; `sliding`: paged, of which a request keeps the first `sinks` and the last "
            "`window` tokens; `offloaded`: paged, preempted requests keep their blocks in host memory. See "
            "docs/kv_kinds.md.",
        )
        dtype: KVCacheDtype = Field(
            "auto",
            description="How a paged cache keeps keys and values: `auto` in the model's own dtype; `int8`, `fp8_e4m3` "
            "and `int4` as codes with one scale a token and KV head, quantized when a token is computed, dequantized "
            "inside attention. See docs/kv_cache.md for what each costs.",
        )
        block_size: int | None = Field(
            None, ge=1, le=4096, description="Tokens a block of a paged cache; none lets the attention backend choose."
        )
        sinks: int = Field(0, ge=0, description="First tokens that a sliding cache always keeps.")
        window: int | None = Field(None, ge=1, description="Last tokens that a sliding cache keeps.")
        offload_gib: float | None = Field(
            None, gt=0, description="Host memory that an offloaded cache may take for preempted requests, GiB; else 4."
        )
        prefix_caching: bool = Field(
            True, description="Reuse the blocks of a prefix that another request has computed (paged cache)."
        )

        @model_validator(mode="after")
        def _possible(self) -> KVCache.Config:
            if self.kind == "sliding" and self.window is None:
                raise ValueError("a sliding cache needs `window`, the number of tokens it keeps")
            if self.kind != "sliding" and (self.window is not None or self.sinks):
                raise ValueError(f"`window` and `sinks` belong to kind: sliding, not to kind: {self.kind}")
            if self.kind not in BLOCKS and self.block_size is not None:
                raise ValueError(f"`block_size` belongs to kind: {', '.join(BLOCKS)}, not to kind: {self.kind}")
            if self.kind != "offloaded" and self.offload_gib is not None:
                raise ValueError(f"`offload_gib` belongs to kind: offloaded, not to kind: {self.kind}")
            return self

    config: Config

    def plan(self, info: ModelInfo) -> PlanItem:
        """A refusal for each setting that this version's runtime would not honour."""
        per_token = bytes_per_token(info.config, info.dtype_bytes)
        notes = [f"KV cache: {per_token:,} bytes a token in the model's own dtype"] if per_token else []
        quantized = quantized_bytes_per_token(info.config, self.config.dtype)
        if per_token and quantized:
            notes = [
                f"KV cache: {quantized:,} bytes a token in {self.config.dtype}, scales included, and {per_token:,} in "
                f"the model's own dtype: {per_token / quantized:.2f} times the tokens in the same memory"
            ]
        if self.config.kind == "sliding":
            kept = self.config.sinks + (self.config.window or 0)
            notes.append(
                f"sliding KV cache: {kept} tokens a request, rounded up to blocks; a proof sees what that costs only "
                f"in windows (`evaluate.window_length`) of more than {kept} tokens"
            )
        return PlanItem(
            summary=self._summary(),
            refusals=self._refusals(),
            notes=notes,
            runtime={"kv_cache": self._spec().model_dump()},
        )

    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Write the specification. Raises RunError where the runtime would not honour it."""
        refusals = self._refusals()
        if refusals:
            raise RunError(refusals[0], where=self.name)
        model.runtime.kv_cache = self._spec()
        return PassReport(self._summary(), details=self._spec().model_dump())

    def _summary(self) -> str:
        config = self.config
        kind: str = config.kind
        if kind == "sliding":
            kind += f" ({config.sinks} sinks, window {config.window})"
        elif kind == "offloaded":
            kind += f" ({self._spec().offload_gib:g} GiB)"
        return f"{kind} KV cache, dtype {config.dtype}"

    def _spec(self) -> KVCacheSpec:
        return KVCacheSpec(**self.config.model_dump(exclude_none=True))

    def _refusals(self) -> list[str]:
        refusals = []
        if self.config.kind not in RUNS_HERE:
            refusals.append(
                f"kind: {self.config.kind} is not in this version's runtime, which has {', '.join(RUNS_HERE)}: a "
                "request takes blocks as it grows, and one block of the longest length would hold fewer requests"
            )
        if self.config.dtype != "auto" and self.config.kind not in BLOCKS:
            refusals.append(
                f"dtype: {self.config.dtype} needs kind: paged, sliding or offloaded; a {self.config.kind} cache is in "
                "the model's own dtype"
            )
        return refusals


def bytes_per_token(config: PreTrainedConfig, element_size: int) -> int | None:
    """Bytes of keys and values that one token takes over all layers; None where the config does not tell."""
    shape = cache_shape(config)
    return None if shape is None else 2 * shape[0] * shape[1] * shape[2] * element_size


def quantized_bytes_per_token(config: PreTrainedConfig, dtype: KVCacheDtype) -> int | None:
    """The same in a quantized cache, scales included; None for `auto` too."""
    from ..runtime.kernels.kv_format import FORMATS

    shape = cache_shape(config)
    if shape is None or dtype not in FORMATS:
        return None
    layers, heads, dim = shape
    return layers * heads * FORMATS[dtype].token_bytes(dim)


def cache_shape(config: PreTrainedConfig) -> tuple[int, int, int] | None:
    """(layers, KV heads, elements of a head); None where the config does not tell."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    layers = getattr(text, "num_hidden_layers", None)
    hidden = getattr(text, "hidden_size", None)
    if not (heads and layers and hidden):
        return None
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    return layers, kv_heads, head_dim
