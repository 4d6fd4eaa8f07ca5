"""A GGUF file's metadata besides the tokenizer: `general.*`, and the architecture's figures from the model's config.

Keys and meanings: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; which of them an architecture reads stands
in llama.cpp's src/models.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...optimizer.errors import UsageError
from .families import Family, head_dim

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from numpy.typing import NDArray

    from ...optimizer.base import Context

SWA_PATTERNS = {"gemma2": 2, "gemma3": 6}
"""Every how many layers llama.cpp takes one for full attention where the file does not say."""
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the models for which llama.cpp scales attention by hidden size over heads, not by head width."""


def add_general(writer: GGUFWriter, record: dict[str, Any]) -> None:
    """`general.*`: record has name, description, size_label, license, base_model and file_type; any may be None."""
    writer.add_type("model")
    writer.add_name(record["name"])
    writer.add_quantized_by("llmopt")
    if record.get("description"):
        writer.add_description(record["description"])
    if record.get("size_label"):
        writer.add_size_label(record["size_label"])
    if record.get("license"):
        writer.add_license(record["license"])
    if record.get("base_model"):
        writer.add_base_model_count(1)
        organization, _, name = record["base_model"].rpartition("/")
        writer.add_base_model_name(0, name)
        if organization and "/" not in organization and not organization.startswith("."):
            writer.add_base_model_organization(0, organization)
    writer.add_file_type(record["file_type"])
    writer.add_quantization_version(2)


def add_architecture(writer: GGUFWriter, family: Family, config: Any, context: Context) -> None:
    """The figures that llama.cpp builds the graph from. Raises UsageError for a config that its graph cannot follow."""
    check_supported(family, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    _add_rope(writer, family, config, context)
    _add_window(writer, family, config, context)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = getattr(config, key, None)
        if value is not None:
            getattr(writer, f"add_{key}")(value)


def check_supported(family: Family, config: Any) -> None:
    """Raise UsageError where llama.cpp's graph would compute something else than the config says."""
    reasons = []
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    wanted = "gelu_pytorch_tanh" if family.arch.startswith("gemma") else "silu"
    if activation not in (wanted, "gelu_new" if wanted != "silu" else "swish"):
        reasons.append(f"the activation {activation} (it has {wanted})")
    if family.arch in LARGE_GEMMA:
        scalar = config.query_pre_attn_scalar
        large = config.num_hidden_layers == LARGE_GEMMA[family.arch]
        own = config.hidden_size // config.num_attention_heads if large else head_dim(config)
        if not math.isclose(scalar, own):
            reasons.append(f"query_pre_attn_scalar {scalar} (it scales by {own})")
        if family.arch == "gemma3" and getattr(config, "attn_logit_softcapping", None) is not None:
            reasons.append("soft-capped attention in gemma3")
        if getattr(config, "use_bidirectional_attention", False):
            reasons.append("bidirectional attention")
    if getattr(config, "mlp_bias", False):
        reasons.append("biases in the MLP")
    if family.arch == "phi3" and head_dim(config) * config.num_attention_heads != config.hidden_size:
        reasons.append("heads that do not make up the hidden size")
    if reasons:
        raise UsageError(f"llama.cpp's {family.arch} does not do {'; '.join(reasons)}", "gguf")


def rope_parameters(config: Any) -> dict[str, Any]:
    """The rope parameters of full attention."""
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found.get("full_attention", found))


def _add_rope(writer: GGUFWriter, family: Family, config: Any, context: Context) -> None:
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    writer.add_rope_dimension_count(int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    sliding = (config.rope_parameters or {}).get("sliding_attention")
    if sliding:
        if sliding.get("rope_type", "default") != "default":
            raise UsageError("llama.cpp does not scale positions in sliding layers", "gguf")
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
    from gguf import RopeScalingType

    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        _add_yarn(writer, rope)
    elif kind == "longrope":
        context.note(
            "note",
            "llama.cpp takes LongRoPE's long factors where the reserved context is longer than the original one, this "
            "model where the text is",
        )
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original_length(config, rope))
        writer.add_rope_scaling_attn_factors(longrope_factor(config, rope))
    elif kind not in ("default", "llama3"):
        raise UsageError(f"llama.cpp has no position scaling of kind {kind!r}", "gguf")
    if family.arch == "phi3" and kind != "longrope":
        writer.add_rope_scaling_orig_ctx_len(original_length(config, rope))


def _add_yarn(writer: GGUFWriter, rope: dict[str, Any]) -> None:
    from gguf import RopeScalingType

    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key, add in (
        ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
    ):
        if rope.get(key) is not None:
            add(rope[key])


def original_length(config: Any, rope: dict[str, Any]) -> int:
    """Positions that the model was trained on before they were stretched."""
    found = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return int(found or config.max_position_embeddings)


def longrope_factor(config: Any, rope: dict[str, Any]) -> float:
    """LongRoPE's factor on cosines and sines (Ding et al. 2024), as transformers computes it."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = original_length(config, rope)
    scale = config.max_position_embeddings / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def rope_tensors(config: Any) -> dict[str, NDArray[Any]]:
    """Tensors of divisors of the rotation's frequencies, float32 [head_dim / 2], where the config scales them so."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        lengths = ("long", "short")
        return {f"rope_factors_{key}.weight": np.asarray(rope[f"{key}_factor"], np.float32) for key in lengths}
    if kind != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double().numpy()
    width = head_dim(config)
    plain = float(rope["rope_theta"]) ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    return {"rope_freqs.weight": (plain / scaled).astype(np.float32)}


def _add_window(writer: GGUFWriter, family: Family, config: Any, context: Context) -> None:
    window = getattr(config, "sliding_window", None)
    if family.arch in SWA_PATTERNS and window:
        writer.add_sliding_window(window)
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        pattern = SWA_PATTERNS[family.arch]
        if slides != [(i + 1) % pattern != 0 for i in range(len(slides))]:
            writer.add_sliding_window_pattern(slides)
        return
    if family.arch == "phi3":
        writer.add_sliding_window(window or 0)
    layers = getattr(config, "layer_types", None)
    used = window and ("sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True))
    if used and window < config.max_position_embeddings:
        context.note(
            "fallback",
            f"llama.cpp's {family.arch} attends to all tokens, not to the last {window} as this model does: answers "
            f"past {window} tokens differ",
        )
