"""Runs ONNX graphs of decoders on onnxruntime."""
