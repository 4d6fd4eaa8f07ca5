"""Builds the graph of a decoder from its recognized structure, layer by layer.

The structure is `runtime/kernels/recognize.py`'s: found in the torch modules part by part, so that every architecture
that it understands (llama, qwen2, qwen3, mistral, gemma2, gemma3, phi3 and others of that build) is written the same
way, and what it does not understand is refused by name.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ...runtime.kernels.recognize import Layer, ModelStructure, rope_table
from .attention import Attention, AttentionLayer, AttentionShape, make_attention
from .graph import Graph, Name, onnx_library
from .linear import Linears
from .operators import Operators
from .settings import Choices
from .tokens import TokenTable

if TYPE_CHECKING:
    import torch


def write_decoder(graph: Graph, structure: ModelStructure, choices: Choices, context: int) -> Linears:
    """Write the whole decoder: input_ids to logits. context: positions that the rotary tables hold.

    Returns what wrote the linear layers, for its counts.
    """
    return DecoderWriter(graph, structure, choices, context).write()


class DecoderWriter:
    """One decoder on its way into a graph."""

    def __init__(self, graph: Graph, structure: ModelStructure, choices: Choices, context: int) -> None:
        self.graph, self.structure, self.choices = graph, structure, choices
        self.linears = Linears(graph, choices)
        self.operators = Operators(graph, choices, self.linears, structure.norm_eps)
        self.tokens = TokenTable(self.linears, structure.embedding, structure.head, structure.head_tied)

        @cache
        def tables(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
            return rope_table(structure.rotary, kind, context)

        self._tables = tables

    def write(self) -> Linears:
        s, operators, types = self.structure, self.operators, onnx_library().TensorProto
        self.graph.input("input_ids", types.INT64, ["batch_size", "sequence_length"])
        shape = AttentionShape(s.heads, s.kv_heads, s.head_dim)
        element = types.FLOAT16 if operators.half else types.FLOAT
        self.graph.output("logits", element, ["batch_size", "sequence_length", s.vocab])
        attention = make_attention(operators, self.choices, shape, self._tables)
        hidden, delta = operators.scale(self.tokens.embed(), s.embedding_scale, "embedding"), None
        for index, layer in enumerate(s.layers):
            hidden, delta = self._layer(index, layer, attention, hidden, delta)
        normed, _ = operators.add_norm(hidden, delta, s.final_norm, "norm")
        logits = self.tokens.logits(normed)
        logits = operators.scale(logits, s.logit_scale, "lm_head")
        logits = operators.soft_cap(logits, s.logit_cap, "lm_head")
        self.graph.node("Identity", [logits], ["logits"])
        return self.linears

    def _layer(
        self, index: int, layer: Layer, attention: Attention, hidden: Name, delta: Name | None
    ) -> tuple[Name, Name]:
        """The residual stream before this layer's last addition, and what is to be added."""
        operators, where = self.operators, f"layers.{index}"
        normed, hidden = operators.add_norm(hidden, delta, layer.input_norm, f"{where}/input_norm")
        together = self.choices.flavor == "genai" and layer.q_norm is None
        q, *rest = self.linears([layer.q, layer.k, layer.v], normed, f"{where}/attention", whole=together)
        k, v = rest or ("", "")
        q = self._head_norm(q, layer.q_norm, f"{where}/q_norm")
        k = self._head_norm(k, layer.k_norm, f"{where}/k_norm")
        own = AttentionLayer(index, layer.attention_scale, layer.window, layer.rope, layer.attention_cap, layer.sinks)
        mixed = attention(own, q, k, v, f"{where}/attention")
        (out,) = self.linears([layer.o], mixed, f"{where}/attention")
        delta = self._delta(out, layer.post_attention_norm, layer, f"{where}/post_attention_norm")
        normed, hidden = operators.add_norm(hidden, delta, layer.pre_mlp_norm, f"{where}/pre_mlp_norm")
        gate, up = self.linears([layer.gate, layer.up], normed, f"{where}/mlp")
        gated = self.graph.node("Mul", [operators.activation(layer.activation, gate, f"{where}/mlp"), up], where=where)
        (out,) = self.linears([layer.down], gated, f"{where}/mlp")
        return hidden, self._delta(out, layer.post_mlp_norm, layer, f"{where}/post_mlp_norm")

    def _delta(self, out: Name, norm: torch.Tensor | None, layer: Layer, where: str) -> Name:
        """What a block adds to the residual stream."""
        out = out if norm is None else self.operators.rms_norm(out, norm, where)
        return self.operators.scale(out, layer.residual_scale, where)

    def _head_norm(self, x: Name, weight: torch.Tensor | None, where: str) -> Name:
        """The norm of queries or keys, of each head or of all together."""
        if weight is None:
            return x
        size = self.structure.head_dim
        if weight.numel() != size:
            return self.operators.rms_norm(x, weight, where)
        split = self.graph.node("Reshape", [x, self.graph.ints(0, 0, -1, size)], where=where)
        normed = self.operators.rms_norm(split, weight, where)
        return self.graph.node("Reshape", [normed, self.graph.ints(0, 0, -1)], where=where)
