"""Opens a source, in memory or with its weights left in their files, and refuses one that cannot be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.open import open_config, open_generation_config, open_model, quiet_transformers, resolve_dtype
from .errors import LlmoptError, RunError, WeightError
from .model import LoadedModel, SourceIdentity
from .runtime_spec import RuntimeSpec

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def load_source(source: SourceIdentity, dtype: str = "auto", trust_remote_code: bool = False) -> LoadedModel:
    """The source's weights, tokenizer and generation config, on the CPU, in `dtype` (`auto`: as stored).

    Raises RunError where a file is damaged, a weight is NaN or infinite (in `dtype`), or the tokenizer has more tokens
    than the model has embeddings.
    """
    opened = open_model(source.folder, "cpu", dtype, trust_remote_code=trust_remote_code)
    module, tokenizer = opened.module, opened.tokenizer
    _require_unquantized(module, source)
    _require_finite(module, source)
    _require_embeddings(module, tokenizer, source)
    module.generation_config = opened.generation_config
    return LoadedModel(module, tokenizer, source, trust_remote_code=trust_remote_code)


def open_source(source: SourceIdentity, dtype: str = "auto", trust_remote_code: bool = False) -> LoadedModel | str:
    """The source as a lazy model: its weights stay in their files. Where that cannot be, a sentence that says why.

    Raises RunError as `load_source` does; weights are checked as they are read.
    """
    from ..runtime.lazy import open_lazy
    from ..runtime.tokenizer_files import open_tokenizer

    with quiet_transformers():
        config = open_config(source.folder, trust_remote_code)
        tokenizer = open_tokenizer(source.folder, trust_remote_code)
        wanted = resolve_dtype(dtype, RuntimeSpec(), config)
        opened = open_lazy(source.folder, config, wanted, source.id, trust_remote_code)
    if isinstance(opened, str):
        return opened
    module, weights = opened
    _require_unquantized(module, source)
    _require_embeddings(module, tokenizer, source)
    module.generation_config = open_generation_config(source.folder, module)
    model = LoadedModel(module, tokenizer, source, trust_remote_code=trust_remote_code, weights=weights)
    return _why_not_by_block(model) or model


def _why_not_by_block(model: LoadedModel) -> str | None:
    """Why the model's blocks cannot run one at a time, found by trying with two tokens; None where they can."""
    import torch

    from ..runtime.decoder_blocks import capture, find_blocks
    from ..runtime.embedding_rows import loaded_around
    from ..runtime.lazy import outside_blocks

    try:
        name, blocks = find_blocks(model.module)
        head = model.module.get_output_embeddings()
        needed = [n for n in outside_blocks(model.module, name) if model.module.get_submodule(n) is not head]
        with torch.inference_mode(), loaded_around(model, *needed, f"{name}.0"):
            capture(model.module, blocks, [torch.ones(1, 2, dtype=torch.int64)])  # see embedding_rows
    except WeightError:
        raise
    except LlmoptError as error:
        return f"its blocks cannot run one at a time ({error})"
    except Exception as error:  # whatever an architecture's own code raises
        return f"its blocks cannot run one at a time ({type(error).__name__}: {error})"
    return None


def _require_unquantized(module: nn.Module, source: SourceIdentity) -> None:
    if getattr(module.config, "quantization_config", None) is not None:
        raise RunError(
            "is quantized already", source.id, "Give the unquantized model: quantizing twice loses quality twice"
        )


def _require_embeddings(module: nn.Module, tokenizer: PreTrainedTokenizerBase, source: SourceIdentity) -> None:
    embeddings = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(tokenizer) > embeddings:
        raise RunError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {embeddings} embeddings",
            source.id,
            "The tokenizer belongs to another model: restore the model's own tokenizer files",
        )


def _require_finite(module: nn.Module, source: SourceIdentity) -> None:
    from ..runtime.tensor_files import all_finite, not_finite

    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not all_finite(tensor):
            raise not_finite(name, tensor, source.id)
