"""The two ends of a decoder: the embedding of its tokens, and the head, which may be one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...optimizer.errors import UsageError
from ...runtime.kernels.formats import PACKED_INTEGERS
from ...runtime.kernels.recognize import LinearPart
from .graph import MICROSOFT, Name, onnx_library
from .linear import Linears
from .nbits import BlockWeight, to_blocks

if TYPE_CHECKING:
    import torch


class TokenTable:
    """Writes both ends.

    table: the embedding's weight [vocab, hidden]; tied: whether the head's weight is that tensor. With `share_head` the
    embedding reads the codes of a rounded head. Raises UsageError where it cannot.
    """

    def __init__(self, linears: Linears, table: torch.Tensor, head: LinearPart, tied: bool) -> None:
        self.linears, self.graph, self.choices = linears, linears.graph, linears.choices
        self.table, self.head, self.tied = table, head, tied
        self._stored: Name | None = None
        self.shared = self._shared_head() if self.choices.share_head else None
        """The head's weight, where the embedding reads it."""
        self._shared_names: list[Name] = []

    def _shared_head(self) -> BlockWeight:
        module = self.head.module
        weight = to_blocks(module.quant_state()) if isinstance(module, PACKED_INTEGERS) else None
        if weight is None or weight.zeros is not None or weight.order is not None:
            raise UsageError(
                "the embedding can only read the codes of a head of packed, symmetric weights",
                "onnx.share_head",
                "Set `lm_head` to int8 or int4, or leave share_head off",
            )
        self.linears.counts["MatMulNBits"] += 1
        return weight

    def embed(self) -> Name:
        """Rows of the table for `input_ids`, `[batch, length, hidden]`."""
        if self.shared is not None:
            return self._embed_blocks(self.shared)
        rows = self.graph.node("Gather", [self._tensor(), "input_ids"], axis=0, where="embedding")
        if self.choices.dtype != "bfloat16":
            return rows
        return self.graph.node("Cast", [rows], to=onnx_library().TensorProto.FLOAT, where="embedding")

    def logits(self, hidden: Name) -> Name:
        """The head's product with `hidden`; a head that is the embedding reads the embedding's tensor."""
        graph = self.graph
        if self.shared is not None:
            return self.linears.blocks(self.shared, hidden, "lm_head", self._shared_names)
        if not self.tied:
            return self.linears([self.head], hidden, "lm_head")[0]
        self.linears.counts["float"] += 1
        table = self._tensor()
        if self.choices.dtype == "bfloat16":
            table = graph.node("Cast", [table], to=onnx_library().TensorProto.FLOAT, where="lm_head")
        turned = graph.node("Transpose", [table], perm=[1, 0], where="lm_head")
        return graph.node("MatMul", [hidden, turned], where="lm_head")

    def _tensor(self) -> Name:
        """The embedding as it is stored."""
        import torch

        if self._stored is None:
            if self.choices.dtype == "bfloat16":
                bits = self.table.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
                self._stored = self.graph.tensor("embedding.weight", bits, onnx_library().TensorProto.BFLOAT16)
            else:
                self._stored = self.linears.plain("embedding.weight", self.table)
        return self._stored

    def _embed_blocks(self, weight: BlockWeight) -> Name:
        """Rows of the head's rounded codes, dequantized (GatherBlockQuantized)."""
        graph, where = self.graph, "embedding"
        packed, scales = self._shared_names = self.linears.block_tensors(weight, "lm_head")
        flat = graph.node("Reshape", [packed, graph.ints(0, -1)], where=where)
        return graph.node(
            "GatherBlockQuantized", [flat, "input_ids", scales], domain=MICROSOFT, where=where,
            bits=weight.bits, block_size=weight.block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip
