"""Attention with its KV cache in two flavours: GroupQueryAttention, and standard operators.

Both read `attention_mask` int64 [batch, past + length] and the caches [batch, kv_heads, past, head_dim] under the names
that optimum and onnxruntime-genai give them.

GroupQueryAttention (com.microsoft) takes the number of tokens of each sequence from the mask: sequences of a batch
start at slot 0, so prompts are padded on the right. The standard operators take positions from `position_ids` and look
at the mask slot by slot: prompts are padded on the left, and a window counts slots.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .graph import MICROSOFT, Dim, Graph, Name, onnx_library
from .operators import Operators
from .settings import Choices

if TYPE_CHECKING:
    import torch

LOWEST = {"float32": -3.4028234663852886e38, "float16": -65504.0}
"""Added to the scores of what a query must not see."""
RopeTables = Callable[[str], tuple["torch.Tensor", "torch.Tensor"]]
"""Layer type → cos and sin, float32 [context, rotary_dim / 2]."""


@dataclass(frozen=True)
class AttentionShape:
    """Of all layers of a model."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass
class AttentionLayer:
    """One layer's attention. window: keys that a query sees, itself included; 0: all. rope: layer type, None: no
    rotation. cap: of the scores, 0: none."""

    index: int
    scale: float
    window: int = 0
    rope: str | None = None
    cap: float = 0.0
    sinks: torch.Tensor | None = None


class Attention(Protocol):
    """Writes the attention of one layer; made once for a graph."""

    def __call__(self, layer: AttentionLayer, q: Name, k: Name, v: Name, where: str) -> Name:
        """`[batch, length, heads * head_dim]` from queries, keys and values of that form.

        GroupQueryAttention also takes all three behind one another in `q`; `k` and `v` are then empty names.
        """
        ...

    def positions(self) -> Name:
        """int64 [batch, length], the position of each new token, for models that learned an embedding of them."""
        ...


def make_attention(operators: Operators, choices: Choices, shape: AttentionShape, tables: RopeTables) -> Attention:
    kind = GroupQueryAttention if choices.flavor == "genai" else PlainAttention
    return kind(operators, shape, tables)


class _Caches:
    """What both flavours share: inputs and outputs of the graph for keys and values."""

    def __init__(self, operators: Operators, shape: AttentionShape, tables: RopeTables) -> None:
        self.operators, self.graph, self.shape, self.tables = operators, operators.graph, shape, tables
        types = onnx_library().TensorProto
        self.element = types.FLOAT16 if operators.half else types.FLOAT
        self.graph.input("attention_mask", types.INT64, ["batch_size", "total_sequence_length"])
        self._ropes: dict[str, tuple[Name, Name]] = {}

    def caches(self, index: int) -> tuple[list[Name], list[Name]]:
        """Names of the past and present keys and values of a layer, declared."""
        past, present = [], []
        for kind in ("key", "value"):
            dims: list[Dim] = ["batch_size", self.shape.kv_heads, "past_sequence_length", self.shape.head_dim]
            past.append(self.graph.input(f"past_key_values.{index}.{kind}", self.element, dims))
            dims[2] = "total_sequence_length"
            present.append(f"present.{index}.{kind}")
            self.graph.output(present[-1], self.element, dims)
        return past, present

    def rope_tables(self, kind: str) -> tuple[Name, Name]:
        """The tensors of a kind's cos and sin."""
        if kind not in self._ropes:
            cos, sin = self.tables(kind)
            label = f"rope.{kind}" if kind else "rope"
            plain = self.operators.linears.plain
            self._ropes[kind] = (plain(f"{label}.cos", cos), plain(f"{label}.sin", sin))
        return self._ropes[kind]


class GroupQueryAttention(_Caches):
    """The operator of com.microsoft: rotation, cache, window and soft-capping in one."""

    def __init__(self, operators: Operators, shape: AttentionShape, tables: RopeTables) -> None:
        super().__init__(operators, shape, tables)
        graph, types = self.graph, onnx_library().TensorProto

        def node(op: str, *inputs: Name, **attributes: Any) -> Name:
            return graph.node(op, list(inputs), where="lengths", **attributes)

        self.count = node("ReduceSum", "attention_mask", graph.ints(1), keepdims=0)
        self.last = node("Cast", node("Sub", self.count, graph.ints(1)), to=types.INT32)
        total = node("Gather", node("Shape", "attention_mask"), _scalar(graph, 1), axis=0)
        self.total = node("Cast", total, to=types.INT32)

    def __call__(self, layer: AttentionLayer, q: Name, k: Name, v: Name, where: str) -> Name:
        past, present = self.caches(layer.index)
        tables = list(self.rope_tables(layer.rope)) if layer.rope is not None else ["", ""]
        inputs = [q, k, v, *past, self.last, self.total, *tables]
        if layer.sinks is not None:
            inputs += ["", "", self.operators.linears.plain(f"{where}.sinks", layer.sinks)]
        out = self.graph.unique(f"{where}/output")
        self.graph.node(
            "GroupQueryAttention", inputs, [out, *present], domain=MICROSOFT, where=where,
            num_heads=self.shape.heads, kv_num_heads=self.shape.kv_heads, scale=layer.scale, softcap=layer.cap,
            local_window_size=layer.window or -1, do_rotary=int(layer.rope is not None), rotary_interleaved=0,
        )  # fmt: skip
        return out

    def positions(self) -> Name:
        """Counted from the mask, as the operator does for its rotation: new tokens stand behind the sequence's others.
        Those of a first prompt begin at 0, where the padding makes more tokens than the mask counts."""
        graph = self.graph

        def node(op: str, *inputs: Name, **attributes: Any) -> Name:
            return graph.node(op, list(inputs), where="positions", **attributes)

        length = node("Gather", node("Shape", "input_ids"), _scalar(graph, 1), axis=0)
        start = node("Max", node("Sub", self.count, length), _scalar(graph, 0))
        new = node("Range", _scalar(graph, 0), length, _scalar(graph, 1))
        return node("Add", node("Unsqueeze", start, graph.ints(1)), new)


class PlainAttention(_Caches):
    """MatMul, Softmax and a mask that is computed once for each window."""

    def __init__(self, operators: Operators, shape: AttentionShape, tables: RopeTables) -> None:
        super().__init__(operators, shape, tables)
        types = onnx_library().TensorProto
        self.graph.input("position_ids", types.INT64, ["batch_size", "sequence_length"])
        self._masks: dict[int, Name] = {}
        self._rotations: dict[str, tuple[Name, Name]] = {}

    def __call__(self, layer: AttentionLayer, q: Name, k: Name, v: Name, where: str) -> Name:
        graph, shape = self.graph, self.shape
        heads, groups, size = shape.heads, shape.kv_heads, shape.head_dim

        def node(op: str, *inputs: Name, **attributes: Any) -> Name:
            return graph.node(op, list(inputs), where=where, **attributes)

        def by_heads(x: Name, count: int) -> Name:
            return node("Transpose", node("Reshape", x, graph.ints(0, 0, count, size)), perm=[0, 2, 1, 3])

        query, key, value = by_heads(q, heads), by_heads(k, groups), by_heads(v, groups)
        if layer.rope is not None:
            query, key = (self._rotate(x, layer.rope, where) for x in (query, key))
        query = self.operators.scale(query, layer.scale, where)
        past, present = self.caches(layer.index)
        for old, new, out in zip(past, (key, value), present):
            graph.node("Concat", [old, new], [out], axis=2, where=where)
        if heads != groups:  # a group's queries as one matrix, so that keys and values are not repeated
            query = node("Reshape", query, graph.ints(0, groups, -1, size))
        scores = node("MatMul", query, node("Transpose", present[0], perm=[0, 1, 3, 2]))
        if heads != groups:
            scores = node("Reshape", scores, self._score_shape())
        scores = self.operators.soft_cap(scores, layer.cap, where)
        scores = node("Add", scores, self._mask(layer.window))
        weights = self._softmax(scores, layer, where)
        if heads != groups:
            weights = node("Reshape", weights, self._grouped_shape())
        mixed = node("MatMul", weights, present[1])
        if heads != groups:
            mixed = node("Reshape", mixed, self._mixed_shape())
        return node("Reshape", node("Transpose", mixed, perm=[0, 2, 1, 3]), graph.ints(0, 0, heads * size))

    def positions(self) -> Name:
        """An input of the graph."""
        return "position_ids"

    def _softmax(self, scores: Name, layer: AttentionLayer, where: str) -> Name:
        """Over the keys; sinks take part in the sum and are dropped."""
        graph = self.graph
        if layer.sinks is None:
            return graph.node("Softmax", [scores], axis=-1, where=where)
        sinks = self.operators.linears.plain(f"{where}.sinks", layer.sinks.view(1, -1, 1, 1))
        column = graph.node("Slice", [scores, graph.ints(0), graph.ints(1), graph.ints(3)], where=where)
        zeros = graph.node("Mul", [column, self.operators.number(0.0)], where=where)
        with_sinks = graph.node("Concat", [scores, graph.node("Add", [zeros, sinks], where=where)], axis=3, where=where)
        weights = graph.node("Softmax", [with_sinks], axis=-1, where=where)
        return graph.node("Slice", [weights, graph.ints(0), graph.ints(-1), graph.ints(3)], where=where)

    # -- computed once

    def _length(self, value: Name, axis: int) -> Name:
        """int64 [1], the size of an axis of an input."""
        shape = self.graph.node("Shape", [value], where="mask")
        return self.graph.node("Gather", [shape, self.graph.ints(axis)], axis=0, where="mask")

    def _once(self, key: str, make: Callable[[], Name]) -> Name:
        found = self.__dict__.get(key)
        if found is None:
            found = self.__dict__[key] = make()
        return found

    def _score_shape(self) -> Name:
        """[batch, heads, length, total], as a value, since two of them are not known."""
        parts = [self.graph.ints(0), self.graph.ints(self.shape.heads), self.rows, self.columns]
        return self._once("score_shape", lambda: self.graph.node("Concat", parts, axis=0, where="mask"))

    def _grouped_shape(self) -> Name:
        parts = [self.graph.ints(0), self.graph.ints(self.shape.kv_heads), self.graph.ints(-1), self.columns]
        return self._once("grouped_shape", lambda: self.graph.node("Concat", parts, axis=0, where="mask"))

    def _mixed_shape(self) -> Name:
        sizes = [self.graph.ints(0), self.graph.ints(self.shape.heads), self.rows, self.graph.ints(self.shape.head_dim)]
        return self._once("mixed_shape", lambda: self.graph.node("Concat", sizes, axis=0, where="mask"))

    @property
    def rows(self) -> Name:
        """Length of the new tokens, int64 [1]."""
        return self._once("rows_name", lambda: self._length("position_ids", 1))

    @property
    def columns(self) -> Name:
        """Length of past and new tokens, int64 [1]."""
        return self._once("columns_name", lambda: self._length("attention_mask", 1))

    def _mask(self, window: int) -> Name:
        """[batch, 1, length, total]: 0 where a query sees a key, else a number that makes its weight 0."""
        if window in self._masks:
            return self._masks[window]
        graph, types = self.graph, onnx_library().TensorProto

        def node(op: str, *inputs: Name, **attributes: Any) -> Name:
            return graph.node(op, list(inputs), where="mask", **attributes)

        def counted(first: Name, last: Name, axis: int) -> Name:
            """Slots from `first` to `last` (both int64 [1]) as [1, n] or [n, 1]."""
            squeezed = [node("Squeeze", value, graph.ints(0)) for value in (first, last)]
            return node("Unsqueeze", node("Range", *squeezed, _scalar(graph, 1)), graph.ints(axis))

        keys = counted(graph.ints(0), self.columns, 0)
        queries = counted(node("Sub", self.columns, self.rows), self.columns, 1)
        seen = node("LessOrEqual", keys, queries)
        if window:
            seen = node("And", seen, node("Less", node("Sub", queries, keys), graph.ints(window)))
        real = node("Cast", node("Unsqueeze", "attention_mask", graph.ints(1, 2)), to=types.BOOL)
        seen = node("And", real, seen)
        lowest = self.operators.number(LOWEST[self.operators.linears.numpy_dtype])
        self._masks[window] = node("Where", seen, self.operators.number(0.0), lowest)
        return self._masks[window]

    def _rotate(self, x: Name, kind: str, where: str) -> Name:
        """Rotary embedding of `[batch, heads, length, head_dim]`, halves against each other."""
        graph = self.graph

        def node(op: str, *inputs: Name, **attributes: Any) -> Name:
            return graph.node(op, list(inputs), where=where, **attributes)

        cos, sin, half = *self._rotation(kind), self.tables(kind)[0].shape[1]
        rest = self.shape.head_dim - 2 * half
        sizes = [half, half, rest] if rest else [half, half]
        parts = graph.node("Split", [x, graph.ints(*sizes)], len(sizes), axis=-1, where=where)
        first = node("Sub", node("Mul", parts[0], cos), node("Mul", parts[1], sin))
        second = node("Add", node("Mul", parts[1], cos), node("Mul", parts[0], sin))
        return node("Concat", first, second, *parts[2:], axis=-1)

    def _rotation(self, kind: str) -> tuple[Name, Name]:
        """cos and sin of the positions, [batch, 1, length, rotary_dim / 2]."""
        if kind not in self._rotations:
            pair = []
            for table in self.rope_tables(kind):
                rows = self.graph.node("Gather", [table, "position_ids"], axis=0, where="rope")
                pair.append(self.graph.node("Unsqueeze", [rows, self.graph.ints(1)], where="rope"))
            self._rotations[kind] = (pair[0], pair[1])
        return self._rotations[kind]


def _scalar(graph: Graph, value: int) -> Name:
    """int64 []."""
    import numpy as np

    return graph.constant(np.array(value, dtype=np.int64))
