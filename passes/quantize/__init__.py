"""Weight quantization: the `quantize` pass and the parts it is made of."""

from .quantize import Quantize

__all__ = ["Quantize"]
