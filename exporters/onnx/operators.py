"""Operators that several parts of a decoder are made of: norms, activations, soft-capping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .graph import MICROSOFT, Graph, Name, onnx_library
from .linear import Linears
from .settings import Choices

if TYPE_CHECKING:
    import torch


class Operators:
    """Writes them into a graph, in the dtype that the choices compute in."""

    def __init__(self, graph: Graph, choices: Choices, linears: Linears, epsilon: float) -> None:
        self.graph, self.choices, self.linears, self.epsilon = graph, choices, linears, epsilon
        self.half = choices.dtype == "float16"

    def rms_norm(self, x: Name, weight: torch.Tensor, where: str) -> Name:
        """`x / rms(x) * weight` over the last axis, in float32."""
        graph, types = self.graph, onnx_library().TensorProto

        def node(op: str, *inputs: Name, **attributes: Any) -> Name:
            return graph.node(op, list(inputs), where=where, **attributes)

        wide = node("Cast", x, to=types.FLOAT) if self.half else x
        normed = node("Div", wide, self._root(wide, self.epsilon, where))
        normed = node("Cast", normed, to=types.FLOAT16) if self.half else normed
        return node("Mul", normed, self.linears.plain(f"{where}.weight", weight))

    def _root(self, x: Name, epsilon: float, where: str) -> Name:
        """`sqrt(mean(x ** 2) + epsilon)` over the last axis, [.., 1].

        With `Pow` it is the pattern that onnxruntime fuses into its norm on CPUs, which sums the squares one after
        another: of one norm's result all elements are then too large or too small by the same few units of the last
        place, and such errors add up over the layers. So a graph that has to be exact squares by `Mul`.
        """
        graph = self.graph
        if self.choices.exact:
            square = graph.node("Mul", [x, x], where=where)
        else:
            square = graph.node("Pow", [x, graph.floats(2.0)], where=where)
        mean = graph.node("ReduceMean", [square, graph.ints(-1)], keepdims=1, where=where)
        return graph.node("Sqrt", [graph.node("Add", [mean, graph.floats(epsilon)], where=where)], where=where)

    @property
    def _fused(self) -> bool:
        """Whether sums and norms are operators of com.microsoft: faster than their parts, and less exact (`_root`)."""
        return self.choices.flavor == "genai" and not self.choices.exact

    def add_norm(self, x: Name, delta: Name | None, weight: torch.Tensor | None, where: str) -> tuple[Name, Name]:
        """`x + delta` (delta None: x) normed (weight None: not), and the sum itself."""
        graph = self.graph
        if delta is not None and weight is not None and self._fused:
            stored = self.linears.plain(f"{where}.weight", weight)
            normed, total = graph.unique(f"{where}/output"), graph.unique(f"{where}/sum")
            graph.node(
                "SkipSimplifiedLayerNormalization", [x, delta, stored], [normed, "", "", total],
                domain=MICROSOFT, where=where, epsilon=self.epsilon,
            )  # fmt: skip
            return normed, total
        total = x if delta is None else graph.node("Add", [x, delta], where=where)
        return (total if weight is None else self.rms_norm(total, weight, where)), total

    def add_layer_norm(self, x: Name, delta: Name | None, norm: Any, where: str) -> tuple[Name, Name]:
        """`x + delta` (delta None: x) through `norm`, an nn.LayerNorm with a bias, and the sum itself."""
        graph = self.graph
        stored = [self.linears.plain(f"{where}.weight", norm.weight), self.linears.plain(f"{where}.bias", norm.bias)]
        if delta is not None and self._fused:
            normed, total = graph.unique(f"{where}/output"), graph.unique(f"{where}/sum")
            graph.node(
                "SkipLayerNormalization", [x, delta, *stored], [normed, "", "", total],
                domain=MICROSOFT, where=where, epsilon=norm.eps,
            )  # fmt: skip
            return normed, total
        total = x if delta is None else graph.node("Add", [x, delta], where=where)
        if not self.choices.exact:
            return graph.node("LayerNormalization", [total, *stored], axis=-1, epsilon=norm.eps, where=where), total
        mean = graph.node("ReduceMean", [total, graph.ints(-1)], keepdims=1, where=where)
        centred = graph.node("Sub", [total, mean], where=where)
        scaled = graph.node("Div", [centred, self._root(centred, norm.eps, where)], where=where)
        return graph.node("Add", [graph.node("Mul", [scaled, stored[0]], where=where), stored[1]], where=where), total

    def activation(self, kind: str, x: Name, where: str) -> Name:
        """kind: a key of `recognize.ACTIVATIONS`."""
        if kind == "silu":
            return self.graph.node("Mul", [x, self.graph.node("Sigmoid", [x], where=where)], where=where)
        if kind == "relu":
            return self.graph.node("Relu", [x], where=where)
        return self.graph.node("Gelu", [x], approximate="tanh" if kind == "gelu_tanh" else "none", where=where)

    def scale(self, x: Name, factor: float, where: str) -> Name:
        if factor == 1.0:
            return x
        return self.graph.node("Mul", [x, self.number(factor)], where=where)

    def soft_cap(self, x: Name, cap: float, where: str) -> Name:
        """`cap * tanh(x / cap)`; 0: no cap."""
        if not cap:
            return x
        inner = self.graph.node("Div", [x, self.number(cap)], where=where)
        return self.scale(self.graph.node("Tanh", [inner], where=where), cap, where)

    def number(self, value: float) -> Name:
        """A scalar of the dtype that is computed."""
        return self.graph.floats(value, self.linears.numpy_dtype)
