"""Products of 16-bit matrices on x86 processors that have no instructions for them.

Without AVX-512's or AMX's bfloat16 instructions torch multiplies bfloat16 matrices some five times slower than float32
ones, and float16 without AVX-512 FP16 twelve times. Within `wide_products` such a product is computed on float32
copies and its result rounded once, which is what the instructions do: every product of two 16-bit floats is exact in
float32, and sums are kept in it. Linear layers take weights and tokens in parts, unless a gradient is recorded, so that
their copies are small; other products copy their factors whole.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

FEW = 8
"""Rows below which reading the weight takes longer than multiplying by it, so that a copy would not pay."""
WEIGHT_PART = 1 << 22
"""Weights that are converted at once (16 MiB)."""
TOKEN_PART = 1024
"""Rows of inputs that are converted at once."""
MATRIX_PRODUCTS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__)


@lru_cache(maxsize=1)
def slow_dtypes() -> frozenset[torch.dtype]:
    """The 16-bit dtypes that this processor multiplies slower than float32."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    found = set()
    if not _any_flag("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        found.add(torch.bfloat16)
    if not _any_flag("_is_avx512_fp16_supported", "_is_amx_fp16_supported") and not _float16_products():
        found.add(torch.float16)
    return frozenset(found)


def _any_flag(*names: str) -> bool:
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in names)


def _float16_products() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def wide_products(device: torch.device | str = "cpu") -> AbstractContextManager[Any]:
    """While it lasts, products of dtypes that the processor is slow with are computed in float32 and rounded to the
    dtype: linear layers, matrix products and attention, with their gradients. Changes nothing on other devices.
    """
    return WideProducts() if torch.device(device).type == "cpu" and slow_dtypes() else nullcontext()


class WideProducts(TorchFunctionMode):
    """The mode behind `wide_products`, whatever the processor."""

    def __init__(self, dtypes: Iterable[torch.dtype] | None = None) -> None:
        super().__init__()
        self.dtypes = frozenset(slow_dtypes() if dtypes is None else dtypes)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if "out" not in options and self._takes(args):
            if func is F.linear:
                return _linear(*args, **options)
            if func in MATRIX_PRODUCTS or func is F.scaled_dot_product_attention:
                return _converted(func, args[0].dtype, args, options)
        return func(*args, **options)

    def _takes(self, args: tuple[Any, ...]) -> bool:
        """Whether all tensors but masks of truth values have one of the dtypes: torch refuses mixtures."""
        found = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype != torch.bool]
        if not found or found[0] is not args[0] or found[0].dtype not in self.dtypes:
            return False
        return all(tensor.dtype == found[0].dtype and not tensor.is_meta for tensor in found)


def _converted(func: Callable[..., Any], dtype: torch.dtype, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype == dtype else value

    return func(*map(wide, args), **{name: wide(value) for name, value in options.items()}).to(dtype)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = input.numel() // max(1, input.shape[-1])
    same = weight.dtype == input.dtype and (bias is None or (bias.dtype == input.dtype and bias.dim() == 1))
    if rows < FEW or weight.dim() != 2 or not same:
        return F.linear(input, weight, bias)
    wide_bias = None if bias is None else bias.float()
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias))
    if recorded:  # one piece, as the tape would keep the parts anyway
        return F.linear(input.float(), weight.float(), wide_bias).to(input.dtype)
    flat = input.reshape(rows, input.shape[-1])
    out = flat.new_empty(rows, weight.shape[0])
    step = max(1, WEIGHT_PART // max(1, weight.shape[1]))
    for low in range(0, weight.shape[0], step):
        part = weight[low : low + step].float()
        own = None if wide_bias is None else wide_bias[low : low + step]
        for start in range(0, rows, TOKEN_PART):
            stop = start + TOKEN_PART
            out[start:stop, low : low + step] = F.linear(flat[start:stop].float(), part, own)
    return out.view(*input.shape[:-1], weight.shape[0])
