"""Writes a model's graph, by the writer that knows its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...optimizer.errors import UsageError
from ...runtime.chat import context_length
from ...runtime.kernels.recognize import UnsupportedModel, recognize
from .attention import AttentionShape
from .decoder import write_decoder
from .graph import Graph
from .settings import Choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .linear import Linears

DEFAULT_CONTEXT = 2048
"""Positions, where the config names none."""


@dataclass(frozen=True)
class Written:
    """What a graph came to."""

    shape: AttentionShape
    vocab: int
    context: int
    counts: dict[str, int]

    @property
    def format(self) -> str:
        """How the linear layers are stored, in words."""
        return " + ".join(name for name, count in self.counts.items() if count)


def write_model(module: PreTrainedModel, folder: Path, choices: Choices, external: bool) -> Written:
    """Write model.onnx (and model.onnx_data) for a float32 model. Raises UsageError where no writer knows it."""
    from .gpt2 import is_gpt2, write_gpt2

    context = context_length(module.config) or DEFAULT_CONTEXT
    graph = Graph(folder, external)
    try:
        if is_gpt2(module):
            linears, shape, vocab = write_gpt2(graph, module, choices)
        else:
            structure = recognize(module)
            shape, vocab = AttentionShape(structure.heads, structure.kv_heads, structure.head_dim), structure.vocab
            linears = write_decoder(graph, structure, choices, context)
        graph.save(_metadata(choices, shape, context))
    except UnsupportedModel as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise UsageError(f"no graph is written for {type(module).__name__}: {reason}", "onnx") from None
    finally:
        graph.close()
    return _written(linears, shape, vocab, context)


def _written(linears: Linears, shape: AttentionShape, vocab: int, context: int) -> Written:
    counts = {name: count for name, count in linears.counts.items() if count}
    return Written(shape, vocab, context, counts)


def _metadata(choices: Choices, shape: AttentionShape, context: int) -> dict[str, str]:
    """What `llmopt.load` reads from the model file."""
    return {
        "llmopt.flavor": choices.flavor,
        "llmopt.dtype": choices.dtype,
        "llmopt.accuracy_level": str(choices.accuracy_level),
        "llmopt.context": str(context),
        "llmopt.heads": str(shape.heads),
    }
