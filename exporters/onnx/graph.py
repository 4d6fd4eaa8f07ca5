"""A graph as it is written: nodes and names in memory, large tensors straight into the file beside it.

ONNX IR: https://onnx.ai/onnx/repo-docs/IR.html; external data: https://onnx.ai/onnx/repo-docs/ExternalData.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ...optimizer.errors import MissingDependency, RunError

if TYPE_CHECKING:
    import numpy as np
    import onnx

OPSET = 21
"""Of the domain ai.onnx; what onnxruntime 1.20 and later, and onnxruntime-web, run."""
IR_VERSION = 10
MICROSOFT = "com.microsoft"
MODEL, DATA = "model.onnx", "model.onnx_data"
"""The graph, and its weights under the name by which transformers.js asks for them."""
ALIGNMENT = 64
"""Bytes; the offsets of external tensors are multiples of it."""
INLINE = 1024
"""Tensors of fewer bytes stay in model.onnx."""
PROTOBUF_LIMIT = 2**31 - 2**20
"""Bytes that one protobuf file may have, less some room for the graph."""

Name = str
"""Of a value in the graph."""
Dim = int | str


class Graph:
    """Collects nodes and tensors, and writes them to `folder` on `save`.

    external: whether tensors of INLINE bytes and more go to model.onnx_data, one after another, at once: then memory
    holds one tensor at a time. Raises RunError on `save` where the rest does not fit one protobuf file.
    """

    def __init__(self, folder: Path, external: bool = True) -> None:
        self.folder, self.external = folder, external
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], Name] = {}
        self._file: BinaryIO | None = (folder / DATA).open("wb") if external else None
        self._inline_bytes = 0

    # -- values

    def input(self, name: Name, dtype: int, shape: Sequence[Dim]) -> Name:
        """Declare an input of the graph. dtype: a TensorProto element type."""
        self.inputs.append(onnx_library().helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: Name, dtype: int, shape: Sequence[Dim]) -> None:
        self.outputs.append(onnx_library().helper.make_tensor_value_info(name, dtype, list(shape)))

    def unique(self, name: str) -> Name:
        """`name`, with a number behind it where it is taken."""
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else f"{name}_{count}"

    def tensor(self, name: str, array: np.ndarray, element: int | None = None) -> Name:
        """Add an initializer. element: the TensorProto type where `array` holds another type's bits, as uint16 does
        those of bfloat16."""
        import numpy as np

        library = onnx_library()
        kind = element if element is not None else library.helper.np_dtype_to_tensor_dtype(array.dtype)
        name = self.unique(name)
        proto = library.TensorProto(name=name, data_type=kind, dims=array.shape)
        data = np.ascontiguousarray(array)
        if self._file is None or data.nbytes < INLINE:
            proto.raw_data = data.tobytes()
            self._inline_bytes += data.nbytes
        else:
            self._write(proto, data)
        self.tensors.append(proto)
        return name

    def _write(self, proto: onnx.TensorProto, data: np.ndarray) -> None:
        assert self._file is not None
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        offset = self._file.tell()
        self._file.write(data.reshape(-1).view("uint8").data)
        proto.data_location = onnx_library().TensorProto.EXTERNAL
        for key, value in (("location", DATA), ("offset", str(offset)), ("length", str(data.nbytes))):
            entry = proto.external_data.add()
            entry.key, entry.value = key, value

    def constant(self, array: np.ndarray) -> Name:
        """An initializer for a small constant; equal ones are shared."""
        key = (str(array.dtype), array.tobytes(), array.shape)
        if key not in self._constants:
            self._constants[key] = self.tensor("constant", array)
        return self._constants[key]

    def ints(self, *values: int) -> Name:
        """int64 [n]."""
        import numpy as np

        return self.constant(np.array(values, dtype=np.int64))

    def floats(self, value: float, dtype: Any = "float32") -> Name:
        """A scalar."""
        import numpy as np

        return self.constant(np.array(value, dtype=dtype))

    # -- nodes

    def node(
        self,
        op: str,
        inputs: Sequence[Name],
        outputs: int | Sequence[Name] = 1,
        domain: str = "",
        where: str = "",
        **attributes: Any,
    ) -> Any:
        """Add a node; returns its output's name, or a list where `outputs` is not 1. where: prefix of new names."""
        prefix = f"{where}/{op}" if where else op
        if isinstance(outputs, int):
            names = [self.unique(f"{prefix}/output") for _ in range(outputs)]
        else:
            names = list(outputs)
        made = onnx_library().helper.make_node(
            op, list(inputs), names, name=self.unique(prefix), domain=domain, **attributes
        )
        self.nodes.append(made)
        return names[0] if outputs == 1 else names

    # -- the file

    def save(self, metadata: dict[str, str]) -> None:
        """Write model.onnx. Raises RunError where it would be larger than protobuf allows."""
        library = onnx_library()
        helper = library.helper
        if self._file is not None:
            self._file.close()
        if self._inline_bytes > PROTOBUF_LIMIT:
            raise RunError(
                f"{self._inline_bytes / 2**30:.1f} GiB of weights do not fit one protobuf file",
                MODEL,
                "Leave `external_data` on",
            )
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, initializer=self.tensors)
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain == MICROSOFT for node in self.nodes):
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="llmopt")
        helper.set_model_props(model, metadata)
        with (self.folder / MODEL).open("wb") as file:
            file.write(model.SerializeToString())

    def close(self) -> None:
        """Let go of the data file, for a graph that is given up."""
        if self._file is not None:
            self._file.close()


def onnx_library() -> Any:
    """The library `onnx`. Raises MissingDependency."""
    try:
        import onnx
    except ImportError:
        raise MissingDependency("onnx", "onnx", "the exporter onnx") from None
    return onnx
