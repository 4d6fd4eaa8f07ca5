"""What exporters for other libraries share: files beside the weights, and why no recipe names them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..runtime.open import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..optimizer.model import LoadedModel

CARRIED = ("*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files of the source that go along, where saving the tokenizer has not written them."""


def write_companions(model: LoadedModel, directory: Path, **changes: Any) -> None:
    """Config, tokenizer, chat template, generation config and license. The config names no quantization, which is the
    format's own; changes: further fields of it."""
    config = deepcopy(cast("PreTrainedModel", model.module).config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for name, value in changes.items():
        setattr(config, name, value)
    with quiet_transformers():
        config.save_pretrained(directory)
        model.tokenizer.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
    carry(model.source.folder, directory)


def carry(source: Path, directory: Path, patterns: Iterable[str] = CARRIED) -> None:
    """Copy the source's files of these names that are not in the directory yet."""
    for pattern in patterns:
        for file in source.glob(pattern):
            if file.is_file() and not (directory / file.name).exists():
                shutil.copy2(file, directory / file.name)


def not_of_a_recipe(name: str) -> list[str]:
    """`Exporter.refusals` of an exporter whose format gives no logits of whole texts."""
    return [
        f"the {name} exporter does not measure perplexity as recipes do: write the artifact with the exporter "
        f"`huggingface`, then run `llmopt export ARTIFACT --format {name} --out DIR`"
    ]
