"""The exporter `onnx`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...optimizer.base import Context, Exporter, PlanItem
from ..companions import not_of_a_recipe, write_companions
from .settings import Choices, OnnxOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...optimizer.model import LoadedModel, ModelInfo
    from .written import Written


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
        return not_of_a_recipe(self.name)

    def export(self, model: LoadedModel, directory: Path, context: Context) -> dict[str, Any]:
        """Write and prove the folder; `model` is changed on the way. Raises UsageError for a model that no graph can
        be written for, RunError where the graph does not compute what the model does."""
        from .gate import prove_graph
        from .prepare import note_runtime, prepare, unpack
        from .simplify import simplify
        from .written import write_model

        module = cast("PreTrainedModel", model.module)
        choices = Choices.of(self.config, model.runtime.linear)
        note_runtime(model.runtime, context)
        prepare(module, choices, context)
        external = self.config.external_data
        written = write_model(module, directory, choices, external)
        nodes = simplify(directory, external, choices.dtype == "bfloat16") if self.config.simplify else None
        unpack(module)
        if written.counts.get("MatMulNBits") and not choices.accuracy_level:
            context.note("note", "packed weights are multiplied in float32; activations=int8 is faster, and less exact")
        _write_beside(model, directory, written, choices)
        parity = prove_graph(module, model.tokenizer, directory, choices, written, self.config.gate_tokens, context)
        return {
            "name": self.name,
            "config": self.config.model_dump(mode="json"),
            "flavor": choices.flavor,
            "format": written.format,
            "accuracy_level": choices.accuracy_level,
            "lm_head": choices.lm_head,
            "linears": written.counts,
            "nodes": nodes,
            "exact": choices.exact and choices.lm_head == "stored",
            "parity": parity,
        }


def _write_beside(model: LoadedModel, directory: Path, written: Written, choices: Choices) -> None:
    """Config, tokenizer and the rest, and genai_config.json for that flavor."""
    from ...runtime.open import token_ids_of_end
    from .genai_config import CONFIG, genai_config

    write_companions(model, directory, dtype="float16" if choices.dtype == "float16" else "float32")
    if choices.flavor == "genai":
        config = cast("PreTrainedModel", model.module).config
        ends = token_ids_of_end(model.generation_config, config, model.tokenizer)
        contents = genai_config(
            config.get_text_config(), model.generation_config, written.shape, written.vocab, written.context, ends
        )
        (directory / CONFIG).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
