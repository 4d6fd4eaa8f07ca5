"""The exporter `onnx`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...optimizer.base import Context, Exporter, PlanItem
from ...optimizer.errors import UsageError
from .settings import Choices, OnnxOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...optimizer.model import LoadedModel, ModelInfo
    from .written import Written

CARRIED = ("*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files of the source that go along."""


class OnnxExporter(Exporter):
    """One ONNX graph with KV cache, for onnxruntime-genai (`flavor: genai`) or optimum and others (`flavor: ort`).

    Packed integer weights become MatMulNBits, value for value. After it is written, a fresh process holds the graph
    against the torch model: logits of a prefill and of every decode step of a batch of unequal lengths, and the text.
    """

    name = "onnx"

    class Config(OnnxOptions):
        pass

    config: Config

    def refusals(self, info: ModelInfo, plans: Sequence[PlanItem], dtype: str) -> list[str]:
        """See `Exporter.refusals`."""
        return [
            "the onnx exporter does not measure perplexity as recipes do: write the artifact with the exporter "
            "`huggingface`, then run `llmopt export ARTIFACT --format onnx --out DIR`"
        ]

    def export(self, model: LoadedModel, directory: Path, context: Context) -> dict[str, Any]:
        """Write and prove the folder; `model` is changed on the way. Raises UsageError for a model that no graph can
        be written for, RunError where the graph does not compute what the model does."""
        from .gate import prove_graph
        from .prepare import note_runtime, prepare, unpack
        from .written import write_model

        module = cast("PreTrainedModel", model.module)
        choices = Choices.of(self.config, model.runtime.linear)
        note_runtime(model.runtime, context)
        prepare(module, choices, context)
        written = write_model(module, directory, choices, self.config.external_data)
        if written.dequantized:
            context.note(
                "fallback",
                f"{len(written.dequantized)} packed layers are written as plain weights with the same values, first "
                f"{written.dequantized[0]}: their groups are no blocks of MatMulNBits",
            )
        unpack(module)
        if written.counts.get("MatMulNBits") and not choices.accuracy_level:
            context.note("note", "packed weights are multiplied in float32; activations=int8 is faster, and less exact")
        _write_companions(model, directory, written, choices)
        parity = prove_graph(module, model.tokenizer, directory, choices, written, self.config.gate_tokens, context)
        return {
            "name": self.name,
            "config": self.config.model_dump(mode="json"),
            "flavor": choices.flavor,
            "format": written.format,
            "accuracy_level": choices.accuracy_level,
            "lm_head": choices.lm_head,
            "linears": written.counts,
            "exact": choices.exact and choices.lm_head == "stored",
            "parity": parity,
        }


def _write_companions(model: LoadedModel, directory: Path, written: Written, choices: Choices) -> None:
    """Config, tokenizer, chat template, generation config, and genai_config.json for that flavor."""
    from ...runtime.open import quiet_transformers, token_ids_of_end
    from .genai_config import CONFIG, genai_config

    module = cast("PreTrainedModel", model.module)
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.config.dtype = "float16" if choices.dtype == "float16" else "float32"
    with quiet_transformers():
        module.config.save_pretrained(directory)
        model.tokenizer.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
    for pattern in CARRIED:
        for file in model.source.folder.glob(pattern):
            if file.is_file() and not (directory / file.name).exists():
                shutil.copy2(file, directory / file.name)
    if choices.flavor == "genai":
        text = module.config.get_text_config()
        ends = token_ids_of_end(model.generation_config, module.config, model.tokenizer)
        contents = genai_config(text, model.generation_config, written.shape, written.vocab, written.context, ends)
        (directory / CONFIG).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def require_flavor(flavor: str, allowed: Sequence[str], architecture: str) -> None:
    """Raise UsageError where an architecture is not written in this flavor."""
    if flavor not in allowed:
        raise UsageError(
            f"{architecture} is not written in the flavor {flavor}", "onnx.flavor", f"Set flavor={allowed[0]}"
        )
