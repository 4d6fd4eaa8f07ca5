"""Builds the graph of a decoder from its recognized structure, layer by layer.

The structure is `runtime/kernels/recognize.py`'s: found in the torch modules part by part, so that every architecture
that it understands (llama, qwen2, qwen3, mistral, gemma2, gemma3, phi3 and others of that build) is written the same
way, and what it does not understand is refused by name.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ...optimizer.errors import UsageError
from ...runtime.kernels.packed import PackedLinear
from ...runtime.kernels.recognize import Layer, ModelStructure, rope_table
from .attention import Attention, AttentionLayer, AttentionShape, make_attention
from .graph import MICROSOFT, Graph, Name, onnx_library
from .linear import Linears
from .nbits import BlockWeight, to_blocks
from .operators import Operators
from .settings import Choices

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
        self._embedding: Name | None = None
        self.shared = self._shared_head() if choices.share_head else None
        """The head's weight, where the embedding reads it."""
        self._shared_names: list[Name] = []

        @cache
        def tables(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
            return rope_table(structure.rotary, kind, context)

        self._tables = tables

    def write(self) -> Linears:
        s, types = self.structure, onnx_library().TensorProto
        self.graph.input("input_ids", types.INT64, ["batch_size", "sequence_length"])
        shape = AttentionShape(s.heads, s.kv_heads, s.head_dim)
        element = types.FLOAT16 if self.operators.half else types.FLOAT
        self.graph.output("logits", element, ["batch_size", "sequence_length", s.vocab])
        attention = make_attention(self.operators, self.choices, shape, self._tables)
        hidden, delta = self._embed(), None
        for index, layer in enumerate(s.layers):
            hidden, delta = self._layer(index, layer, attention, hidden, delta)
        normed, _ = self.operators.add_norm(hidden, delta, s.final_norm, "norm")
        logits = self._head(normed)
        logits = self.operators.scale(logits, s.logit_scale, "lm_head")
        logits = self.operators.soft_cap(logits, s.logit_cap, "lm_head")
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

    # -- embedding and head

    def _shared_head(self) -> BlockWeight:
        """Raises UsageError where the embedding cannot read the head's codes."""
        module = self.structure.head.module
        weight = to_blocks(module.quant_state()) if isinstance(module, PackedLinear) else None
        if weight is None or weight.zeros is not None or weight.order is not None:
            raise UsageError(
                "the embedding can only read the codes of a head of packed, symmetric weights",
                "onnx.share_head",
                "Set `lm_head` to int8 or int4, or leave share_head off",
            )
        self.linears.counts["MatMulNBits"] += 1
        return weight

    def _embed(self) -> Name:
        s, graph, types = self.structure, self.graph, onnx_library().TensorProto
        if self.shared is not None:
            hidden = self._embed_blocks(self.shared)
        elif self.choices.dtype == "bfloat16":
            rows = graph.node("Gather", [self._table(), "input_ids"], axis=0, where="embedding")
            hidden = graph.node("Cast", [rows], to=types.FLOAT, where="embedding")
        else:
            hidden = graph.node("Gather", [self._table(), "input_ids"], axis=0, where="embedding")
        return self.operators.scale(hidden, s.embedding_scale, "embedding")

    def _table(self) -> Name:
        """The embedding as it is stored."""
        import torch

        if self._embedding is None:
            table = self.structure.embedding
            if self.choices.dtype == "bfloat16":
                bits = table.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
                self._embedding = self.graph.tensor("embedding.weight", bits, onnx_library().TensorProto.BFLOAT16)
            else:
                self._embedding = self.linears.plain("embedding.weight", table)
        return self._embedding

    def _head(self, normed: Name) -> Name:
        """Logits; a head that is the embedding reads the embedding's tensor."""
        graph, types = self.graph, onnx_library().TensorProto
        if self.shared is not None:
            return self.linears.blocks(self.shared, normed, "lm_head", self._shared_names)
        if not self.structure.head_tied:
            return self.linears([self.structure.head], normed, "lm_head")[0]
        self.linears.counts["float"] += 1
        table = self._table()
        if self.choices.dtype == "bfloat16":
            table = graph.node("Cast", [table], to=types.FLOAT, where="lm_head")
        turned = graph.node("Transpose", [table], perm=[1, 0], where="lm_head")
        return graph.node("MatMul", [normed, turned], where="lm_head")

    def _embed_blocks(self, weight: BlockWeight) -> Name:
        """Rows of the head's rounded codes, dequantized (GatherBlockQuantized)."""
        graph, where = self.graph, "embedding"
        packed, scales = self._shared_names = self.linears.block_tensors(weight, "lm_head")
        flat = graph.node("Reshape", [packed, graph.ints(0, -1)], where=where)
        return graph.node(
            "GatherBlockQuantized", [flat, "input_ids", scales], domain=MICROSOFT, where=where,
            bits=weight.bits, block_size=weight.block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip
