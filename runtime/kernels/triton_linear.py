"""A Triton kernel for a few rows over 4-bit packed weights, read as `PackedLinear` stores them: no second copy.

Importing this module needs triton. On the CPU it runs in Triton's interpreter only (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CODES_PER_WORD = 8
MAX_ROWS = 16
"""More rows read the weights too often: each row is a program of its own."""
BLOCK_N, BLOCK_WORDS = 32, 32


@triton.jit
def w4_rows_kernel(
    x_ptr,  # [rows, K]
    packed_ptr,  # int32 [N, K / 8]
    scale_ptr,  # [N, G]
    zero_ptr,  # uint8 [N, G]
    bias_ptr,  # [N]
    out_ptr,  # [rows, N]
    N,
    words,  # K / 8
    words_per_group,
    groups,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """out[row, n] = sum over k of x[row, k] * (code[n, k] - zero[n, g]) * scale[n, g] + bias[n], summed in float32."""
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, words, BLOCK_WORDS):
        word = first + tl.arange(0, BLOCK_WORDS)
        mask = inside[:, None] & (word < words)[None, :]
        codes = tl.load(packed_ptr + n[:, None] * words + word[None, :], mask=mask, other=0)
        group = n[:, None] * groups + (word // words_per_group)[None, :]
        scale = tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
        else:
            zero = tl.full([BLOCK_N, BLOCK_WORDS], 8.0, tl.float32)
        part = tl.zeros([BLOCK_N, BLOCK_WORDS], tl.float32)
        for j in tl.static_range(8):
            value = ((codes >> (4 * j)) & 15).to(tl.float32) - zero
            x = tl.load(x_ptr + row * words * 8 + word * 8 + j, mask=word < words, other=0.0).to(tl.float32)
            part += value * x[None, :]
        total += tl.sum(part * scale, axis=1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, total.to(out_ptr.dtype.element_ty), mask=inside)


def w4_rows(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x [rows, K] times the packed weight's transpose: [rows, N] in the dtype of x.

    packed: int32 [N, K / 8]; scales: [N, G]; zeros: uint8 [N, G], or None for the constant 8; bias: [N] or None. A
    group is a multiple of 8 columns. All contiguous and on one device.
    """
    rows, (count, words), groups = x.shape[0], packed.shape, scales.shape[1]
    out = torch.empty(rows, count, dtype=x.dtype, device=x.device)
    w4_rows_kernel[(triton.cdiv(count, BLOCK_N), rows)](
        x, packed, scales, packed if zeros is None else zeros, packed if bias is None else bias, out,
        count, words, words // groups, groups,
        HAS_ZEROS=zeros is not None, HAS_BIAS=bias is not None, BLOCK_N=BLOCK_N, BLOCK_WORDS=BLOCK_WORDS,
    )  # fmt: skip
    return out
