"""Codes and scales as llama.cpp's blocks: bit for bit, and read by the gguf library."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from llmopt.exporters.gguf.blocks import Codes, choose, encode, scale_error, value_error
from llmopt.optimizer.errors import RunError


def random_codes(bits: int, group: int, symmetric: bool, seed: int = 0) -> Codes:
    """A weight [6, 128] with scales that bfloat16 holds."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (6, 128)).astype(np.int16)
    scales = (random.integers(128, 256, (6, 128 // group)) * 2.0**-14).astype(np.float32)
    middle = np.full(scales.shape, 2 ** (bits - 1), dtype=np.int16)
    zeros = middle if symmetric else random.integers(0, 2**bits, scales.shape).astype(np.int16)
    return Codes(codes, scales, zeros, bits, symmetric)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "kind"),
    [
        (2, 32, True, "Q4_0"), (4, 32, True, "Q4_0"), (4, 64, True, "Q4_0"), (4, 128, True, "Q4_0"),
        (5, 32, True, "Q5_0"), (6, 64, True, "Q8_0"), (8, 32, True, "Q8_0"), (8, 128, True, "Q8_0"),
        (4, 32, False, "Q4_1"), (4, 64, False, "Q4_1"), (5, 32, False, "Q5_1"), (6, 32, False, "Q8_0"),
    ],
)  # fmt: skip
def test_values_are_kept(bits: int, group: int, symmetric: bool, kind: str) -> None:
    weight = random_codes(bits, group, symmetric)
    assert choose(weight) == (kind, "")
    data = encode(weight, kind)
    read = dequantize(data, GGMLQuantizationType[kind])
    wanted = weight.dequantize()
    bound = value_error(weight, kind)
    if kind.endswith("_0"):
        assert bound == 0 and scale_error(weight, kind) == 0
        np.testing.assert_array_equal(read, wanted)
    else:
        assert np.abs(read - wanted).max() <= bound < weight.scales.min() / 20


def test_codes_are_bit_for_bit_ours() -> None:
    weight = random_codes(4, 32, True)
    blocks = encode(weight, "Q4_0").reshape(6, 4, 18)
    low, high = blocks[..., 2:] & 15, blocks[..., 2:] >> 4
    np.testing.assert_array_equal(np.concatenate([low, high], axis=-1).reshape(6, 128), weight.codes)
    np.testing.assert_array_equal(np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0], weight.scales)
    asymmetric = random_codes(4, 64, False)
    blocks = encode(asymmetric, "Q4_1").reshape(6, 4, 20)
    low, high = blocks[..., 4:] & 15, blocks[..., 4:] >> 4
    np.testing.assert_array_equal(np.concatenate([low, high], axis=-1).reshape(6, 128), asymmetric.codes)
    eight = random_codes(8, 128, True)
    blocks = encode(eight, "Q8_0").reshape(6, 4, 34)
    np.testing.assert_array_equal(
        np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(6, 128), eight.codes - 128
    )


def test_what_no_type_holds() -> None:
    assert "group size 16" in choose(random_codes(4, 16, True))[1]
    assert "signed byte" in choose(random_codes(8, 32, False))[1]
    weight = random_codes(4, 32, True)
    scattered = Codes(weight.codes, weight.scales, weight.zeros, 4, True, scattered=True)
    assert "no equal runs" in choose(scattered)[1]
    large = Codes(weight.codes, weight.scales * 1e9, weight.zeros, 4, True)
    with pytest.raises(RunError, match="a scale is beyond float16"):
        encode(large, "Q4_0", "layer")


def test_the_error_of_scales_is_measured() -> None:
    weight = random_codes(4, 32, True)
    fine = Codes(weight.codes, weight.scales * np.float32(1.0001), weight.zeros, 4, True)
    assert 0 < scale_error(fine, "Q4_0") <= 2.0**-11
    read = dequantize(encode(fine, "Q4_0"), GGMLQuantizationType.Q4_0)
    assert 0 < np.abs(read - fine.dequantize()).max() <= value_error(fine, "Q4_0")
