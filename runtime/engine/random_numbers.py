"""Counter-based random numbers: a function of (key, position, stream), with no state that neighbours could disturb.

SplitMix64's finalizer (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) over the
three counters. Computed on the host in wrapping uint64, so that every device gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

SAMPLE, ACCEPT, RESAMPLE = 0, 1, 2
"""Streams: plain sampling; the acceptance test and the residual draw of rejection-sampled speculation."""


def mix(value: int) -> int:
    """SplitMix64's finalizer on one 64-bit integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def request_key(seed: int, index: int) -> int:
    """Key of the `index`-th sequence of a request with this seed (any integer)."""
    return mix(mix(seed & _MASK) ^ index)


def uniforms(keys: Sequence[int], positions: Sequence[int], stream: int = SAMPLE) -> np.ndarray:
    """Float64 in [0, 1) for each (key, position): 52 bits, so that u * x < x also after rounding."""
    counter = np.asarray(positions, dtype=np.uint64) * np.uint64(4) + np.uint64(stream)
    return (_mix(_mix(counter) ^ np.asarray(keys, dtype=np.uint64)) >> np.uint64(12)) * 2.0**-52


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
