"""`genai_config.json`, by which onnxruntime-genai opens a folder.

https://onnxruntime.ai/docs/genai/reference/config.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .attention import AttentionShape

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

CONFIG = "genai_config.json"
TYPES = frozenset({
    "ernie4_5", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "nemotron", "olmo", "phi", "phi3",
    "qwen2", "qwen3", "smollm3",
})  # fmt: skip
"""transformers' model types that onnxruntime-genai has under the same name."""
DECODER = "decoder"
"""onnxruntime-genai's type of any other decoder. Its `gpt2` wants keys and values in one tensor, which no buffer can
hold for past and present alike, so that GPT-2 is one of these too."""


def genai_config(
    config: PreTrainedConfig,
    generation: GenerationConfig,
    shape: AttentionShape,
    vocab: int,
    context: int,
    ends: list[int],
) -> dict[str, Any]:
    """The file's contents.

    vocab: rows of the head; context: tokens of the rotary tables; ends: tokens that end a text.
    """
    begin = generation.bos_token_id if generation.bos_token_id is not None else getattr(config, "bos_token_id", None)
    pad = generation.pad_token_id if generation.pad_token_id is not None else getattr(config, "pad_token_id", None)
    end = ends[0] if ends else 0
    inputs = {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    }
    outputs = {
        "logits": "logits",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    }
    model = {
        "bos_token_id": begin if begin is not None else end,
        "context_length": context,
        "decoder": {
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            "filename": "model.onnx",
            "head_size": shape.head_dim,
            "hidden_size": config.hidden_size,
            "inputs": inputs,
            "outputs": outputs,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": shape.kv_heads,
        },
        "eos_token_id": end if len(ends) < 2 else ends,
        "pad_token_id": pad if pad is not None else end,
        "type": config.model_type if config.model_type in TYPES else DECODER,
        "vocab_size": vocab,
    }
    return {"model": model, "search": _search(generation, context)}


def _search(generation: GenerationConfig, context: int) -> dict[str, Any]:
    """Defaults of generation; past and present share one buffer, as GroupQueryAttention allows."""

    def value(name: str, default: Any) -> Any:
        found = getattr(generation, name, None)
        return default if found is None else found

    return {
        "diversity_penalty": 0.0,
        "do_sample": bool(value("do_sample", False)),
        "early_stopping": True,
        "length_penalty": 1.0,
        "max_length": context,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "past_present_share_buffer": True,
        "repetition_penalty": float(value("repetition_penalty", 1.0)),
        "temperature": float(value("temperature", 1.0)),
        "top_k": int(value("top_k", 50)),
        "top_p": float(value("top_p", 1.0)),
    }
