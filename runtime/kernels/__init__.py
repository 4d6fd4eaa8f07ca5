"""Kernels for quantized linear layers and paged attention."""
