"""The GPTQ checkpoint format by its definition, one code at a time."""

from __future__ import annotations

from typing import Any

import torch

TOKENS = torch.randint(2, 400, (2, 11), generator=torch.Generator().manual_seed(0))


def pack_down(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers [L, M] along L: element i takes bits i * bits … of one string of 32-bit words."""
    length, many = values.shape
    words = -(-length * bits // 32)
    out = torch.zeros(words, many, dtype=torch.int64)
    for m in range(many):
        text = sum(int(values[i, m]) << (bits * i) for i in range(length))
        for w in range(words):
            word = text >> (32 * w) & 0xFFFFFFFF
            out[w, m] = word - 2**32 if word >= 2**31 else word
    return out.int()


def unpack_down(words: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    out = torch.zeros(length, words.shape[1], dtype=torch.int64)
    for m in range(words.shape[1]):
        text = sum((int(words[w, m]) & 0xFFFFFFFF) << (32 * w) for w in range(len(words)))
        for i in range(length):
            out[i, m] = text >> (bits * i) & (2**bits - 1)
    return out


def make_tensors(
    rows: int, columns: int, bits: int, size: int, minus_one: bool = True, sym: bool = True, g_idx: Any = None, seed=0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a layer of [rows, columns] with random contents, and its weight by the definition, float64 [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // size)
    codes = torch.randint(0, 2**bits, (columns, rows), generator=generator)
    zeros = torch.full((groups, rows), 2 ** (bits - 1))
    if not sym:
        zeros = torch.randint(1, 2**bits, (groups, rows), generator=generator)
    scales = ((torch.rand(groups, rows, generator=generator) + 0.5) * 0.1 / 2**bits).half()
    index = torch.arange(columns) // size if g_idx is None else g_idx
    weight = torch.stack([(codes[k] - zeros[index[k]]) * scales[index[k]].double() for k in range(columns)])
    tensors = {
        "qweight": pack_down(codes, bits),
        "qzeros": pack_down((zeros - int(minus_one)).t(), bits).t().contiguous(),
        "scales": scales,
        "g_idx": index.int(),
    }
    return tensors, weight.t().contiguous()
