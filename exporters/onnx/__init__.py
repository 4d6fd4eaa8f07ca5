"""The exporter `onnx`: a decoder with KV cache as one ONNX graph, built operator by operator from the model's parts."""

from .exporter import OnnxExporter
