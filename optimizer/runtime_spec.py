"""RuntimeSpec: what passes ask of the runtime, stored in the manifest and applied again by `load`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

AttentionBackend = Literal["auto", "flash_attn", "sdpa", "eager"]
KVCacheKind = Literal["dynamic", "paged", "static", "sliding", "offloaded"]
KVCacheDtype = Literal["auto", "fp8_e4m3", "int8", "int4"]
DraftKind = Literal["none", "ngram", "suffix", "model", "layer_skip"]
ActivationFormat = Literal["none", "int8"]
HeadFormat = Literal["stored", "int8", "int4"]


class Spec(BaseModel):
    """Base of the specification's parts: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class AttentionSpec(Spec):
    backend: AttentionBackend = Field("auto", description="Attention implementation the runtime selects.")
    chosen: str | None = Field(None, description="What `auto` came to when the pass tried the backends.")
    reason: str = Field("", description="Why that backend was chosen, and what was refused.")


class KVCacheSpec(Spec):
    kind: KVCacheKind = Field("dynamic", description="How keys and values are stored.")
    dtype: KVCacheDtype = Field(
        "auto", description="How keys and values are kept: in the model's own dtype, or as codes (paged)."
    )
    block_size: int | None = Field(None, ge=1, description="Tokens a block; None lets the backend choose.")
    sinks: int = Field(0, ge=0, description="First tokens always kept by a sliding cache.")
    window: int | None = Field(None, ge=1, description="Tokens kept by a sliding cache, without the sinks.")
    offload_gib: float = Field(4.0, gt=0, description="Host memory for preempted requests of an offloaded cache, GiB.")
    prefix_caching: bool = Field(True, description="Reuse the blocks of a prefix that was computed before.")


class DraftSpec(Spec):
    kind: DraftKind = Field("none", description="Where drafted tokens come from.")
    num_tokens: int | None = Field(None, ge=1, description="Tokens drafted a step; None is automatic.")
    max_ngram: int = Field(3, ge=1, description="Longest n-gram that `ngram` looks up.")
    history: int | None = Field(None, ge=1, description="Tokens of earlier outputs that `suffix` also looks at.")
    layers: list[int] | None = Field(None, min_length=1, description="Layers that `layer_skip` drafts with, ascending.")
    acceptance: float | None = Field(None, ge=0, le=1, description="Acceptance rate that was measured.")
    model: str | None = Field(None, description="Draft model: folder inside the artifact, or hub id.")
    revision: str | None = Field(None, description="Revision of the draft model on the hub.")
    sha256: str | None = Field(None, description="Hash of the draft model's source when it was paired.")


class LinearSpec(Spec):
    """How linear layers compute, beyond what their stored weights say. Engines that cannot do it say so at load."""

    activation: ActivationFormat = Field(
        "none",
        description="`int8`: activations are quantized at run time, each token and weight group by itself, wherever "
        "the weight is integer; `none`: they enter the products as they are.",
    )
    lm_head: HeadFormat = Field(
        "stored",
        description="The head's weights: as stored, or quantized at load (`int8`: one scale a row, `int4`: groups "
        "of 32).",
    )

    def asked(self) -> dict[str, str]:
        """The settings that are not the default."""
        return {name: value for name, value in self.model_dump().items() if value not in ("none", "stored")}


class FuseSpec(Spec):
    """Linear layers with the same input that engines without a fused decoder multiply as one."""

    qkv: bool = Field(False, description="Queries, keys and values.")
    gate_up: bool = Field(False, description="The feed-forward's gate and up projections.")


class RuntimeSpec(Spec):
    """Attention backend, KV cache, speculation and arithmetic that an artifact is meant to run with."""

    version: Literal[1] = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Activation element type.")
    attention: AttentionSpec = Field(default_factory=AttentionSpec)
    kv_cache: KVCacheSpec = Field(default_factory=KVCacheSpec)
    draft: DraftSpec = Field(default_factory=DraftSpec)
    linear: LinearSpec = Field(default_factory=LinearSpec)
    fuse: FuseSpec = Field(default_factory=FuseSpec)
    extra: dict[str, Any] = Field(default_factory=dict, description="Settings of passes outside llmopt, by pass name.")
