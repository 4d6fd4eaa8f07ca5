"""The architectures that are written, and what llama.cpp wants of their tensors that transformers stores otherwise.

llama.cpp's graphs (src/models) are what is written for: its llama rotates neighbouring pairs of a head's rows where
transformers rotates halves, its gemma norms multiply by the stored weight where transformers adds one to it first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...optimizer.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Family:
    """arch: llama.cpp's name. rotates_pairs: q and k rows are permuted. norm_offset: added to every norm's weight.

    head: whether its graph has a head of its own beside the embedding.
    """

    arch: str
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    head: bool = True


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", rotates_pairs=True),
    "mistral": Family("llama", rotates_pairs=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma2": Family("gemma2", norm_offset=1.0, head=False),
    "gemma3_text": Family("gemma3", norm_offset=1.0),
    "phi3": Family("phi3"),
}
"""transformers' `model_type` → family."""


def find_family(config: Any) -> Family:
    """The family of a model's config. Raises UsageError for one that is not written."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UsageError(
            f"models of type {config.model_type!r} are not written as GGUF",
            "gguf",
            f"It is written for {', '.join(FAMILIES)}; for others use llama.cpp's own converter",
        )
    return family


def head_dim(config: Any) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def row_order(family: Family, config: Any, name: str) -> NDArray[Any] | None:
    """Rows of a stored tensor in llama.cpp's order, as an index; None where they stay."""
    module = name.rsplit(".", 2)[-2] if name.count(".") >= 2 else ""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module)
    if not family.rotates_pairs or heads is None:
        return None
    width = head_dim(config)
    return np.arange(heads * width).reshape(heads, 2, width // 2).swapaxes(1, 2).reshape(-1)


def is_norm(name: str) -> bool:
    """Whether a tensor is a norm's weight."""
    return name.endswith("norm.weight")


def tensor_names(family: Family, config: Any) -> Any:
    """Function from transformers' tensor names to llama.cpp's. It raises UsageError for one that llama.cpp lacks."""
    import gguf

    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family.arch)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def rename(name: str) -> str:
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UsageError(f"llama.cpp's {family.arch} has no place for the tensor {name}", "gguf")
        return found

    return rename
