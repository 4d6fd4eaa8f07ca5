"""The default exporter: a plain Hugging Face folder; transformers, vLLM and others open it with no llmopt installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field

from ..optimizer.base import Context, Exporter, Options, PlanItem
from ..optimizer.errors import RunError
from ..runtime.open import quiet_transformers
from .companions import CARRIED, carry
from .libraries import format_name
from .torchao import add_metadata

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..optimizer.model import LoadedModel, ModelInfo
    from ..runtime.kernels.packed import QuantScheme


class HuggingFaceExporter(Exporter):
    """safetensors weights (quantized ones as compressed-tensors or GPTQ), config, tokenizer, chat template."""

    name = "huggingface"
    streams: ClassVar[bool] = True

    class Config(Options):
        max_shard_size: str = Field(
            "5GB", pattern=r"^\d+(\.\d+)?\s*[KMG]i?B$", description="Greatest size of one weight file, such as 5GB."
        )
        quantization_format: Literal["auto", "compressed-tensors", "gptq"] = Field(
            "auto",
            description="How layers of integer weights are stored: as `compressed-tensors`, or as a `gptq` checkpoint "
            "of 2, 3, 4 or 8 bits with float16 scales, for GPTQModel and older tools. `auto` is compressed-tensors, "
            "except for activation order without static groups, which only gptq holds.",
        )

    config: Config

    def refusals(self, info: ModelInfo, plans: Sequence[PlanItem], dtype: str) -> list[str]:
        """See `Exporter.refusals`: what the chosen format cannot hold."""
        if any(plan.refusals for plan in plans):
            return []
        schemes = {m.name: m.scheme for plan in plans for m in plan.modules if m.scheme is not None}
        open_modules = [m for plan in plans for m in plan.modules if m.candidates]
        if self._by_gptq(schemes.values()):
            from .gptq import plan_refusals

            return plan_refusals(info, schemes, dtype, open_modules)
        if any(scheme.g_idx for scheme in schemes.values()):
            return [
                "activation order without static groups needs a group index per column, which compressed-tensors no "
                "longer stores: set `static_groups: true` or `desc_act: false`, or `quantization_format: gptq` for the "
                "exporter"
            ]
        return []

    def added_bytes(self, info: ModelInfo, plans: Sequence[PlanItem]) -> int:
        """See `Exporter.added_bytes`: a GPTQ checkpoint has group indices too, and zero points of symmetric layers."""
        modules = [m for plan in plans for m in plan.modules if m.scheme is not None]
        if not self._by_gptq(m.scheme for m in modules if m.scheme is not None):
            return 0
        from .gptq import planned_bytes

        return planned_bytes(info, modules) - sum(m.bytes_after for m in modules)

    def _by_gptq(self, schemes: Iterable[QuantScheme]) -> bool:
        """Whether layers of these schemes are stored as a GPTQ checkpoint."""
        if self.config.quantization_format == "auto":
            return any(scheme.g_idx for scheme in schemes)
        return self.config.quantization_format == "gptq"

    def export(self, model: LoadedModel, directory: Path, context: Context) -> dict[str, Any]:
        """Write the folder. Raises RunError where a file that the model needs could not be written."""
        from .compressed_tensors import packed_modules, quantization_config
        from .gptq import gptq_config, write_twin
        from .libraries import library_config

        module = cast("PreTrainedModel", model.module)
        layers: list[Any] = [layer for _, layer in packed_modules(module)]
        by_gptq = bool(layers) and self._by_gptq(layer.scheme for layer in layers)
        quantization = gptq_config(module) if by_gptq else library_config(module) or quantization_config(module)
        if quantization is not None:
            module.config.quantization_config = quantization
        module.config.use_cache = True
        with quiet_transformers():
            self._save_module(model, directory, by_gptq)
            add_metadata(module, directory)
            model.tokenizer.save_pretrained(directory)
            model.generation_config.save_pretrained(directory)
        if quantization is not None and by_gptq:
            write_twin(quantization, directory)
        carry(model.source.folder, directory, ("*.py", *CARRIED))
        _carry_draft(model, directory)
        _require_files(model, directory)
        return {
            "name": self.name,
            "config": self.config.model_dump(mode="json"),
            "format": format_name(quantization) if quantization else str(module.dtype).removeprefix("torch."),
            "quantized_modules": len(layers),
        }

    def _save_module(self, model: LoadedModel, directory: Path, by_gptq: bool) -> None:
        """Write config and weights as `save_pretrained` does; those of a lazy model, and those that a GPTQ checkpoint
        lays out anew, one tensor after another."""
        from ..runtime.memory import parse_size
        from .gptq import write_gptq
        from .shards import write_shards

        module, limit = cast("PreTrainedModel", model.module), parse_size(self.config.max_shard_size)
        if model.weights is None and not by_gptq:
            module.save_pretrained(directory, max_shard_size=limit)
            return
        module.config.dtype = str(module.dtype).removeprefix("torch.")
        module.config.architectures = [type(module).__name__]
        if module.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            # its annotation leaves out the configuration object that its docstring names
            custom_object_save(module, directory, config=module.config)  # type: ignore[arg-type]
        module.config.save_pretrained(directory)
        if model.weights is not None and not by_gptq:
            write_shards(module, model.weights, directory, limit)
        else:
            write_gptq(model, directory, limit)


def _carry_draft(model: LoadedModel, directory: Path) -> None:
    """Copy a draft model that lies on this machine only into the artifact, and let the RuntimeSpec name that copy."""
    from ..optimizer.sources import model_files

    draft = model.runtime.draft
    if draft.kind != "model" or not draft.model:
        return
    if not Path(draft.model).is_dir():
        if Path(draft.model).is_absolute():  # a cached pass result that has outlived what it names
            raise RunError("the draft model is not there any more", draft.model, "Run again with --no-cache.")
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
