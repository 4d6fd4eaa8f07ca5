"""Dense bit packing: unsigned codes of 2 to 8 bits in little-endian int32 words.

The layout is that of compressed-tensors' `pack-quantized` format since its version 0.18 (earlier ones wrote 3, 5, 6 and
7 bits with padding; 2, 4 and 8 bits are the same in all): along the packed
dimension element i occupies bits `i * bits` to `(i + 1) * bits - 1` of one continuous bit string, least significant bit
first, without padding between elements; words are int32. Eight elements fill exactly `bits` bytes, which is how the
functions below walk the string. A signed code q of the format is stored as `q + 2**(bits - 1)`; the functions here see
that unsigned number only.
"""

from __future__ import annotations

import torch


def packed_words(count: int, bits: int) -> int:
    """int32 words that `count` codes of `bits` bits take."""
    return -(-count * bits // 32)


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes `[N, K]`, each below `2**bits`, along K; returns int32 `[N, packed_words(K, bits)]`."""
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % 32)).view(rows, -1, 8)
    out = torch.zeros(rows, padded.shape[1], bits, dtype=torch.uint8, device=codes.device)
    for j in range(8):
        byte, shift = divmod(bits * j, 8)
        out[..., byte] |= padded[..., j] << shift
        if shift + bits > 8:
            out[..., byte + 1] |= padded[..., j] >> (8 - shift)
    return out.view(rows, -1).view(torch.int32)[:, : packed_words(columns, bits)].contiguous()


def unpack_rows(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The inverse of `pack_rows`: int32 `[N, packed_words(columns, bits)]` to uint8 codes `[N, columns]`."""
    rows = packed.shape[0]
    data = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return data[:, :columns]
    if bits == 4:
        return torch.stack((data & 15, data >> 4), dim=-1).view(rows, -1)[:, :columns]
    data = torch.nn.functional.pad(data, (0, -data.shape[1] % bits)).view(rows, -1, bits)
    out = torch.empty(rows, data.shape[1], 8, dtype=torch.uint8, device=packed.device)
    mask = (1 << bits) - 1
    for j in range(8):
        byte, shift = divmod(bits * j, 8)
        value = data[..., byte] >> shift
        if shift + bits > 8:
            value |= data[..., byte + 1] << (8 - shift)
        out[..., j] = value & mask
    return out.view(rows, -1)[:, :columns]
