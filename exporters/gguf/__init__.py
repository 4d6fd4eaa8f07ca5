"""GGUF files for llama.cpp: layers keep our quantized values, and a fresh process proves the file."""

from .exporter import GGUFExporter

__all__ = ["GGUFExporter"]
