"""Hadamard matrices: n mutually orthogonal rows of +1 and -1, so that a rotation by one spreads each channel over all.

Orders are built from Sylvester's doubling and from Paley's two constructions over the integers modulo a prime q (Paley
1933): order q + 1 for q = 3 mod 4, order 2 (q + 1) for q = 1 mod 4. A size that these do not reach gets its odd part
from the discrete cosine transform, which is orthogonal but spreads less evenly.
"""

from __future__ import annotations

import math
from functools import cache

import torch

LARGEST_PALEY = 1024
"""Largest order built as one dense matrix; multiplying by a factor costs its order per element."""
SYLVESTER_FACTOR = 64


def factors(size: int) -> list[torch.Tensor]:
    """Orthogonal matrices, float64, whose Kronecker product has order `size` and a constant first row.

    Raises ValueError where size is not positive.
    """
    if size < 1:
        raise ValueError(f"a rotation of {size} channels is impossible")
    power = size & -size
    odd = size // power
    out = []
    if odd > 1:
        order = next((m for m in _multiples(odd, power) if paley(m) is not None), None)
        matrix = None if order is None else paley(order)
        if matrix is None or order is None:
            out.append(cosine(odd))
        else:
            out.append(matrix / math.sqrt(order))
            power //= order // odd
    while power > 1:
        step = min(power, SYLVESTER_FACTOR)
        out.append(sylvester(step) / math.sqrt(step))
        power //= step
    return out or [torch.ones(1, 1, dtype=torch.float64)]


def is_hadamard(size: int) -> bool:
    """Whether `factors(size)` multiply to a Hadamard matrix, whose entries all have the same magnitude."""
    return all(bool((f.abs() - f.abs()[0, 0]).abs().max() < 1e-12) for f in factors(size))


def sylvester(order: int) -> torch.Tensor:
    """The Hadamard matrix of an order that is a power of two: float64 [order, order] of +1 and -1."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@cache
def paley(order: int) -> torch.Tensor | None:
    """A Hadamard matrix of that order with first row of ones, float64 [order, order]; None where Paley gives none."""
    if order % 4:
        return None
    if is_prime(order - 1):
        matrix = torch.eye(order, dtype=torch.float64) + _bordered(order - 1, -1.0)
    elif (half := order // 2) and half % 2 == 0 and is_prime(half - 1):
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        conference = _bordered(half - 1, 1.0)
        identity = torch.eye(half, dtype=torch.float64)
        matrix = torch.kron(conference, sylvester(2)) + torch.kron(identity, diagonal)
    else:
        return None
    return matrix * matrix[0]


def _bordered(q: int, sign: float) -> torch.Tensor:
    """Paley's conference matrix: quadratic characters of i - j modulo q, bordered by ones; sign -1: skew-symmetric."""
    index = torch.arange(q)
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[(index * index) % q] = 1.0
    character[0] = 0.0
    out = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    out[0, 1:], out[1:, 0] = 1.0, sign
    out[1:, 1:] = character[(index[:, None] - index[None, :]) % q]
    return out


def cosine(order: int) -> torch.Tensor:
    """The orthonormal discrete cosine transform (DCT-II), float64 [order, order]; its first row is constant."""
    index = torch.arange(order, dtype=torch.float64)
    matrix = torch.cos(math.pi / order * (index[None, :] + 0.5) * index[:, None]) * math.sqrt(2.0 / order)
    matrix[0] /= math.sqrt(2.0)
    return matrix


def is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


def _multiples(odd: int, power: int) -> list[int]:
    """`odd` times 4, 8, … up to `power`, the smallest first."""
    return [m for m in (odd << k for k in range(2, power.bit_length())) if m <= LARGEST_PALEY]
