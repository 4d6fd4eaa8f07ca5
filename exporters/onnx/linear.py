"""Linear layers as nodes: plain products, MatMulNBits of packed weights, and int8 products of W8A8 layers.

Layers with the same input are one product where their weights allow it, and its output is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...runtime.kernels.formats import PACKED_INTEGERS
from ...runtime.kernels.recognize import LinearPart
from ...runtime.kernels.scaled import Int8Linear
from .graph import MICROSOFT, Graph, Name, onnx_library
from .nbits import BlockWeight, join, to_blocks
from .settings import Choices

if TYPE_CHECKING:
    import torch


@dataclass
class IntegerWeight:
    """Of a W8A8 layer: codes int8 [N, K], scales float32 [N]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def rows(self) -> int:
        return self.codes.shape[0]


@dataclass
class FloatWeight:
    """weight: floating [N, K]."""

    weight: torch.Tensor

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


Weight = FloatWeight | BlockWeight | IntegerWeight


class Linears:
    """Writes linear layers into a graph."""

    def __init__(self, graph: Graph, choices: Choices) -> None:
        self.graph, self.choices = graph, choices
        self.counts = {"float": 0, "MatMulNBits": 0, "int8": 0}
        """Layers by how they compute."""

    @property
    def numpy_dtype(self) -> str:
        """Of what is computed."""
        return "float16" if self.choices.dtype == "float16" else "float32"

    def __call__(self, parts: Sequence[LinearPart], x: Name, where: str, whole: bool = False) -> list[Name]:
        """The outputs of linear layers that get the input `x` `[batch, length, K]`, in order.

        whole: one output with the columns of all of them, where one product computes them.
        """
        weights = [self._weight(part) for part in parts]
        biases = [_bias(part) for part in parts]
        if whole and all(_fit(weights[0], weight) for weight in weights):
            return [self._product(parts, weights, biases, x, where)]
        outputs: list[Name] = []
        start = 0
        while start < len(parts):
            end = start + 1
            while end < len(parts) and _fit(weights[start], weights[end]):
                end += 1
            chosen = slice(start, end)
            out = self._product(parts[chosen], weights[chosen], biases[chosen], x, where)
            sizes = [weight.rows for weight in weights[chosen]]
            start = end
            if len(sizes) == 1:
                outputs.append(out)
            else:
                outputs += self.graph.node("Split", [out, self.graph.ints(*sizes)], len(sizes), axis=-1, where=where)
        return outputs

    def _weight(self, part: LinearPart) -> Weight:
        module: Any = part.module
        rows = slice(part.first, part.first + part.rows) if part.rows else slice(None)
        if isinstance(module, PACKED_INTEGERS):
            state = module.quant_state()
            zeros = None if state.zeros is None else state.zeros[rows]
            state = replace(state, codes=state.codes[rows], scales=state.scales[rows], zeros=zeros)
            blocks = to_blocks(state)
            assert blocks is not None, part.name  # `prepare` has made the others plain
            self.counts["MatMulNBits"] += 1
            return blocks
        elif isinstance(module, Int8Linear):
            self.counts["int8"] += 1
            return IntegerWeight(module.weight[rows], module.weight_scale[rows].float().view(-1))
        self.counts["float"] += 1
        return FloatWeight(module.weight.detach()[rows])

    def _product(
        self,
        parts: Sequence[LinearPart],
        weights: list[Any],
        biases: list[torch.Tensor | None],
        x: Name,
        where: str,
    ) -> Name:
        """One product for layers whose weights fit each other."""
        import torch

        label = "_".join(part.name.rpartition(".")[2] for part in parts)
        prefix = f"{where}/{label}"
        sizes = [weight.rows for weight in weights]
        if isinstance(weights[0], BlockWeight):
            out = self.blocks(join(weights), x, prefix)
        elif isinstance(weights[0], IntegerWeight):
            joined = IntegerWeight(torch.cat([w.codes for w in weights]), torch.cat([w.scales for w in weights]))
            out = self._integers(joined, x, prefix)
        else:
            weight = torch.cat([w.weight for w in weights]) if len(weights) > 1 else weights[0].weight
            out = self.graph.node("MatMul", [x, self.stored(f"{prefix}.weight", weight.t())], where=prefix)
        if any(bias is not None for bias in biases):
            full = [b if b is not None else torch.zeros(n) for b, n in zip(biases, sizes)]
            out = self.graph.node("Add", [out, self.plain(f"{prefix}.bias", torch.cat(full))], where=prefix)
        return out

    def blocks(self, weight: BlockWeight, x: Name, prefix: str, names: list[Name] | None = None) -> Name:
        """MatMulNBits, after a reordering of the columns where the weight asks for one. names: of its tensors, where
        they are stored already."""
        graph = self.graph
        if weight.order is not None:
            order = graph.tensor(f"{prefix}.order", weight.order.numpy())
            x = graph.node("Gather", [x, order], axis=-1, where=prefix)
        names = names or self.block_tensors(weight, prefix)
        return graph.node(
            "MatMulNBits", [x, *names], domain=MICROSOFT, where=prefix, K=weight.columns, N=weight.rows,
            bits=weight.bits, block_size=weight.block, accuracy_level=self.choices.accuracy_level,
        )  # fmt: skip

    def block_tensors(self, weight: BlockWeight, prefix: str) -> list[Name]:
        """Names of codes, scales and, where there are any, zero points, as they are stored."""
        names = [self.graph.tensor(f"{prefix}.weight_packed", weight.packed.numpy())]
        names.append(self.graph.tensor(f"{prefix}.weight_scale", weight.scales.numpy().astype(self.numpy_dtype)))
        if weight.zeros is not None:
            names.append(self.graph.tensor(f"{prefix}.weight_zero_point", weight.zeros.numpy()))
        return names

    def _integers(self, weight: IntegerWeight, x: Name, prefix: str) -> Name:
        """`s_x (x_int8 W_int8^T) s_w`, the scale of a token max|x| / 127, as `runtime/kernels/scaled.py` computes."""
        graph, types = self.graph, onnx_library().TensorProto

        def node(op: str, *inputs: Name, **attributes: Any) -> Name:
            return graph.node(op, list(inputs), where=prefix, **attributes)

        wide = node("Cast", x, to=types.FLOAT) if self.choices.dtype == "float16" else x
        largest = node("ReduceMax", node("Abs", wide), graph.ints(-1), keepdims=1)
        scale = node("Div", largest, graph.floats(127.0))
        empty = node("Equal", largest, graph.floats(0.0))
        scale = node("Where", empty, graph.floats(1.0), scale)
        rounded = node("Round", node("Div", wide, scale))
        codes = node("Cast", node("Clip", rounded, graph.floats(-128.0), graph.floats(127.0)), to=types.INT8)
        stored = graph.tensor(f"{prefix}.weight", weight.codes.t().contiguous().numpy())
        product = node("Cast", node("MatMulInteger", codes, stored), to=types.FLOAT)
        scales = graph.tensor(f"{prefix}.weight_scale", weight.scales.numpy())
        out = node("Mul", node("Mul", product, scale), scales)
        return node("Cast", out, to=types.FLOAT16) if self.choices.dtype == "float16" else out

    # -- tensors

    def stored(self, name: str, tensor: torch.Tensor) -> Name:
        """A weight in the options' dtype, as a value of the dtype that is computed."""
        import torch

        if self.choices.dtype == "bfloat16":
            bits = tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
            types = onnx_library().TensorProto
            raw = self.graph.tensor(name, bits, types.BFLOAT16)
            return self.graph.node("Cast", [raw], to=types.FLOAT, where=name)
        return self.plain(name, tensor)

    def plain(self, name: str, tensor: torch.Tensor) -> Name:
        """A small tensor (a norm's weight, a bias, a table) in the dtype that is computed."""
        return self.graph.tensor(name, tensor.detach().float().contiguous().numpy().astype(self.numpy_dtype))


def _fit(first: Weight, second: Weight) -> bool:
    if isinstance(first, BlockWeight) and isinstance(second, BlockWeight):
        return first.fits(second)
    return type(first) is type(second) and not isinstance(first, BlockWeight)


def _bias(part: LinearPart) -> torch.Tensor | None:
    bias: Any = getattr(part.module, "bias", None)
    if bias is None:
        return None
    return (bias[part.first : part.first + part.rows] if part.rows else bias).detach().float()
