"""The exporter `gguf`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...optimizer.base import Context, Exporter, PlanItem
from ...optimizer.errors import MissingDependency
from ...optimizer.runtime_spec import RuntimeSpec
from ..companions import not_of_a_recipe, write_companions
from .options import GGUFOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...optimizer.model import LoadedModel, ModelInfo
    from .tensors import Entry

FILE = "model.gguf"
SHOWN = 8
"""Layers that a note names."""


class GGUFExporter(Exporter):
    """One GGUF file for llama.cpp, with config and tokenizer beside it for transformers and `llmopt.load`.

    Quantized layers keep their values where llama.cpp has a type for them. After the file is written, a fresh process
    reads it with transformers and holds every tensor against the model's, then asks llama.cpp, where there is one.
    """

    name = "gguf"

    class Config(GGUFOptions):
        pass

    config: Config

    def refusals(self, info: ModelInfo, plans: Sequence[PlanItem], dtype: str) -> list[str]:
        """See `Exporter.refusals`."""
        return not_of_a_recipe(self.name)

    def export(self, model: LoadedModel, directory: Path, context: Context) -> dict[str, Any]:
        """Write and prove the folder. Raises UsageError for a model that cannot be written, RunError where the file
        is not the model; nothing of it is then left."""
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise MissingDependency("gguf", "gguf", "writing a GGUF file") from None
        from .families import find_family
        from .gate import prove_file
        from .tensors import plan_entries
        from .writer import write_file

        module = cast("PreTrainedModel", model.module)
        family = find_family(module.config)
        entries = plan_entries(module, family, self.config)
        before = set(directory.iterdir())
        try:
            tokenizer = write_file(directory / FILE, model, family, entries, self.config, context)
            write_companions(model, directory)
            _tell(entries, self.config, context)
            _reset_runtime(model, context)
            proof = prove_file(module, model.tokenizer, directory, entries, self.config.llama_server, context)
        except BaseException:
            for path in set(directory.iterdir()) - before:
                path.unlink()
            raise
        kinds = Counter(entry.kind for entry in entries)
        return {
            "name": self.name,
            "config": self.config.model_dump(mode="json"),
            "format": max((kind for kind in kinds if kind != "F32"), key=lambda kind: kinds[kind], default="F32"),
            "architecture": family.arch,
            "tensors": dict(sorted(kinds.items())),
            "kept_values": sum(entry.quantized and not entry.requantized for entry in entries),
            "requantized": [entry.source for entry in entries if entry.requantized],
            "largest_scale_error": max((entry.scale_error for entry in entries), default=0.0),
            "tokenizer": tokenizer,
            "parity": proof,
        }


def _tell(entries: list[Entry], options: GGUFOptions, context: Context) -> None:
    """Note layers that were rounded anew, scales that float16 does not hold, and matrices that no block divides."""
    from .blocks import BLOCK
    from .tensors import FLOATS

    anew = [entry for entry in entries if entry.requantized]
    if anew:
        names = ", ".join(f"{entry.source} → {entry.kind}" for entry in anew[:SHOWN])
        context.note("fallback", f"{len(anew)} quantized layers were rounded anew ({anew[0].requantized}): {names} …")
    if options.type not in ("auto", *FLOATS):
        plain = [entry for entry in entries if len(entry.shape) > 1 and entry.shape[-1] % BLOCK and not entry.quantized]
        if plain:
            names = ", ".join(f"{entry.source} → {entry.kind}" for entry in plain[:SHOWN])
            context.note("fallback", f"{len(plain)} matrices have rows that no block of {BLOCK} divides: {names} …")
    rounded = [entry for entry in entries if entry.scale_error]
    if rounded:
        worst = max(entry.scale_error for entry in rounded)
        context.note(
            "note",
            f"float16 does not hold all scales of {len(rounded)} layers: they are off by up to {worst:.2g} of each",
        )


def _reset_runtime(model: LoadedModel, context: Context) -> None:
    """Drop from the RuntimeSpec what llama.cpp does not follow, and say so."""
    plain = RuntimeSpec.model_validate({})
    spec = model.runtime
    names = ("attention", "kv_cache", "draft", "linear")
    dropped = [name for name in names if getattr(spec, name) != getattr(plain, name)]
    if dropped:
        context.note("note", f"llama.cpp runs by its own settings, not by the RuntimeSpec's {', '.join(dropped)}")
        model.runtime = plain
