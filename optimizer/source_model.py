"""Loads a source into memory and refuses one that cannot be right."""

from __future__ import annotations

from ..runtime.open import open_model
from .errors import RunError
from .model import LoadedModel, SourceIdentity


def load_source(source: SourceIdentity, dtype: str = "auto", trust_remote_code: bool = False) -> LoadedModel:
    """The source's weights, tokenizer and generation config, on the CPU, in `dtype` (`auto`: as stored).

    Raises RunError where a file is damaged, a weight is NaN or infinite, or the tokenizer has more tokens than the
    model has embeddings.
    """
    opened = open_model(source.folder, "cpu", dtype, trust_remote_code=trust_remote_code)
    module, tokenizer = opened.module, opened.tokenizer
    if getattr(module.config, "quantization_config", None) is not None:
        raise RunError(
            "is quantized already", source.id, "Give the unquantized model: quantizing twice loses quality twice"
        )
    _require_finite(opened.module, source)
    embeddings = module.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embeddings:
        raise RunError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {embeddings} embeddings",
            source.id,
            "The tokenizer belongs to another model: restore the model's own tokenizer files",
        )
    module.generation_config = opened.generation_config
    return LoadedModel(module, tokenizer, source, trust_remote_code=trust_remote_code)


def _require_finite(module, source: SourceIdentity) -> None:
    import torch

    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise RunError(f"{name} has {count} values that are NaN or infinite", source.id, "Restore the weights")
