"""The default exporter: a plain Hugging Face folder; transformers, vLLM and others open it with no llmopt installed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from ..optimizer.base import Context, Exporter, Options
from ..optimizer.errors import RunError
from ..runtime.open import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..optimizer.model import LoadedModel

CARRIED = ("*.py", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files of the source that transformers' own saving may leave out."""


class HuggingFaceExporter(Exporter):
    """safetensors weights (quantized ones as compressed-tensors `pack-quantized`), config, tokenizer, chat template."""

    name = "huggingface"
    streams: ClassVar[bool] = True

    class Config(Options):
        max_shard_size: str = Field(
            "5GB", pattern=r"^\d+(\.\d+)?\s*[KMG]i?B$", description="Greatest size of one weight file, such as 5GB."
        )

    def export(self, model: LoadedModel, directory: Path, context: Context) -> dict[str, Any]:
        """Write the folder. Raises RunError where a file that the model needs could not be written."""
        from .compressed_tensors import packed_modules, quantization_config

        module = model.module
        quantization = quantization_config(module)
        if quantization is not None:
            module.config.quantization_config = quantization
        module.config.use_cache = True
        with quiet_transformers():
            self._save_module(model, directory)
            model.tokenizer.save_pretrained(directory)
            model.generation_config.save_pretrained(directory)
        for pattern in CARRIED:
            for file in model.source.folder.glob(pattern):
                if file.is_file() and not (directory / file.name).exists():
                    shutil.copy2(file, directory / file.name)
        _carry_draft(model, directory)
        _require_files(model, directory)
        return {
            "name": self.name,
            "config": self.config.model_dump(mode="json"),
            "format": quantization["format"] if quantization else str(module.dtype).removeprefix("torch."),
            "quantized_modules": sum(1 for _ in packed_modules(module)),
        }

    def _save_module(self, model: LoadedModel, directory: Path) -> None:
        """Write config and weights as `save_pretrained` does; those of a lazy model one tensor after another."""
        from ..runtime.memory import parse_size
        from .shards import write_shards

        module, limit = cast("PreTrainedModel", model.module), parse_size(self.config.max_shard_size)
        if model.weights is None:
            module.save_pretrained(directory, max_shard_size=limit)
            return
        module.config.dtype = str(module.dtype).removeprefix("torch.")
        module.config.architectures = [type(module).__name__]
        if module.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(module, directory, config=module.config)
        module.config.save_pretrained(directory)
        write_shards(module, model.weights, directory, limit)


def _carry_draft(model: LoadedModel, directory: Path) -> None:
    """Copy a draft model that lies on this machine only into the artifact, and let the RuntimeSpec name that copy."""
    from ..optimizer.sources import model_files

    draft = model.runtime.draft
    if draft.kind != "model" or not draft.model or not Path(draft.model).is_dir():
        return
    (directory / "draft").mkdir()
    for file in model_files(Path(draft.model)):
        shutil.copy2(file, directory / "draft" / file.name)
    draft.model, draft.revision = "draft", None


def _require_files(model: LoadedModel, directory: Path) -> None:
    needed = ["config.json", "generation_config.json", "tokenizer_config.json"]
    missing = [name for name in needed if not (directory / name).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if model.tokenizer.chat_template and not (directory / "chat_template.jinja").is_file():
        config = directory / "tokenizer_config.json"
        if not config.is_file() or '"chat_template"' not in config.read_text(encoding="utf-8"):
            missing.append("chat_template.jinja")
    if missing:
        raise RunError(f"the export lacks {', '.join(missing)}", model.source.id, "Report this as a bug in llmopt")
