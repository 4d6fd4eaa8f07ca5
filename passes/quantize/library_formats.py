"""Codes and scales as bitsandbytes and torchao compute them: NF4, LLM.int8() and dynamic int8. No calibration data.

NF4 (Dettmers et al. 2023, arXiv:2305.14314): blocks of 64 weights over the ends of rows, each divided by its largest
magnitude and rounded to the nearest of 16 normal quantiles. LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339): rows
divided by their largest magnitude, in float16. Dynamic int8: rows over the largest magnitude by 127.5. All give the
libraries' own bits, which the tests hold; the layers in `runtime/kernels` run them.
"""

from __future__ import annotations

import torch

from ...runtime.kernels.dynamic8 import EPSILON, nearest
from ...runtime.kernels.dynamic_int8 import quantize_rows
from ...runtime.kernels.four_bit import BLOCK_SIZE, NF4
from ...runtime.kernels.llm_int8 import quantize_inputs
from .fp8 import FloatQuantized

CHUNK = 1 << 18
"""Weights rounded at once, so that temporaries stay in the cache; a multiple of the block."""


def quantize_nf4(weight: torch.Tensor) -> FloatQuantized:
    """NF4 codes uint8 [N, K] and the blocks' scales float32 [ceil(N K / 64)] of `weight` [N, K], any floating dtype."""
    flat = weight.reshape(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    scales = []
    for start in range(0, flat.numel(), CHUNK):
        part, largest = _round_blocks(flat[start : start + CHUNK].float())
        codes[start : start + CHUNK] = part
        scales.append(largest)
    return FloatQuantized(codes.view(weight.shape), torch.cat(scales))


def quantize_llm_int8(weight: torch.Tensor) -> FloatQuantized:
    """Codes int8 [N, K] and the rows' largest magnitudes float32 [N] of `weight` [N, K], any floating dtype."""
    codes, scales, _ = quantize_inputs(weight, threshold=0.0)
    return FloatQuantized(codes, scales)


def quantize_dynamic_int8(weight: torch.Tensor) -> FloatQuantized:
    """Codes int8 [N, K] and scales float32 [N, 1] of `weight` [N, K], any floating dtype."""
    return FloatQuantized(*quantize_rows(weight))


def _round_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a run of blocks, float32; the last one may be short, and is divided rather than multiplied
    by the reciprocal, as bitsandbytes does it."""
    whole = values.numel() // BLOCK_SIZE * BLOCK_SIZE
    blocks = values[:whole].view(-1, BLOCK_SIZE)
    largest = blocks.abs().amax(1)
    shares = [(blocks * (1.0 / largest.clamp(min=EPSILON)).unsqueeze(1)).clamp_(-1, 1).view(-1)]
    if whole < values.numel():
        rest = values[whole:]
        last = rest.abs().amax().clamp(min=EPSILON)
        shares.append((rest / last).clamp_(-1, 1))
        largest = torch.cat((largest, last.view(1)))
    return nearest(torch.cat(shares), torch.tensor(NF4, device=values.device)), largest
