"""Native steps of calibrated quantization: Hessians of bfloat16 inputs, and GPTQ's column loop.

Each function returns False where it cannot run (another device or dtype, no compiler, a processor without the
instructions); the caller then computes the same in torch. The column loop gives the same bits either way; the sums of
outer products differ in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from . import build
from .native import library

NATIVE = "native"
PORTABLE = 1
"""`llmopt_isa` of a library without bfloat16 products."""


@lru_cache(maxsize=1)
def backend() -> str:
    """Where outer products are computed: `native`, or `torch` and why."""
    reason = build.unavailable_reason()
    if reason is None and library().llmopt_isa() == PORTABLE:
        reason = "the processor has no AVX-512 with VNNI"
    return NATIVE if reason is None else f"torch ({reason})"


def add_outer_products(total: torch.Tensor, rows: torch.Tensor) -> bool:
    """Add `rows^T rows`, products and sums in float32, to what is on and below the diagonal of `total`.

    total: float32 [K, K], contiguous; what is above the diagonal is overwritten near it. rows: bfloat16 [R, K].
    """
    if rows.device.type != "cpu" or rows.dtype != torch.bfloat16 or not total.is_contiguous() or backend() != NATIVE:
        return False
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, columns = rows.shape
    done = library().llmopt_outer_products(count, columns, rows.data_ptr(), rows.stride(0), total.data_ptr())
    if done != 0:
        raise MemoryError("packing a batch of calibration inputs")
    return True


def round_columns(
    work: torch.Tensor,
    factor: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: Sequence[int],
    top: float,
    codes: torch.Tensor,
    errors: torch.Tensor,
) -> bool:
    """Round the columns of a block one after another, correcting those behind by `w_j -= U_ij e_i`.

    work: float32 [C, N], the columns' weights, left in any state. factor: float32 [C, C] or a view, U on and above its
    diagonal. scales: float32 [G, N]; zeros: float32 [G, N], or [1, N] for all groups; groups: each column's. Written
    are codes uint8 [C, N], from 0 to `top`, and errors float32 [C, N], `(w_i - q_i) / U_ii`.
    """
    tensors = (work, scales, zeros, codes, errors)
    if work.device.type != "cpu" or build.unavailable_reason() is not None:
        return False
    if not all(tensor.is_contiguous() for tensor in tensors) or factor.stride(1) != 1:
        return False
    columns, rows = work.shape
    index = np.asarray(groups, dtype=np.int32)
    zero_index = index if zeros.shape[0] > 1 else np.zeros_like(index)
    done = library().llmopt_round_columns(
        columns, rows, work.data_ptr(), factor.data_ptr(), factor.stride(0), scales.data_ptr(), zeros.data_ptr(),
        index.ctypes.data, zero_index.ctypes.data, top, codes.data_ptr(), errors.data_ptr(),
    )  # fmt: skip
    if done != 0:
        raise MemoryError("rounding a block of columns")
    return True
