"""Rotation: an orthogonal matrix Q that is applied through small factors instead of being formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .hadamard import factors


@dataclass(frozen=True)
class Rotation:
    """Takes row vectors x to x Q. Built by `randomized` or `mean_preserving`; all arithmetic is float64.

    factors: K = kron(factors). Without a permutation Q = diag(signs) K; with one Q = K^T P K, where P permutes rows and
    multiplies them by signs.
    """

    factors: tuple[torch.Tensor, ...]
    signs: torch.Tensor
    permutation: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.signs)

    @classmethod
    def randomized(cls, size: int, generator: torch.Generator) -> Rotation:
        """A Hadamard matrix whose rows have random signs (QuIP#, QuaRot); where no Hadamard matrix of that order is
        known, one Kronecker factor is a cosine transform."""
        return cls(tuple(factors(size)), _random_signs(size, generator))

    @classmethod
    def mean_preserving(cls, size: int, generator: torch.Generator) -> Rotation:
        """A rotation that keeps the vector of ones: the mean over channels, and so LayerNorm's centering, commutes."""
        signs = _random_signs(size, generator)
        permutation = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(size - 1, generator=generator)])
        signs[0] = 1.0
        return cls(tuple(factors(size)), signs, permutation)

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """`values` Q over the last dimension: float64 [..., size] → the same shape."""
        if self.permutation is None:
            return self._kronecker(values * self.signs, transposed=False)
        inner = self._kronecker(values, transposed=True)
        moved = torch.empty_like(inner)
        moved[..., self.permutation] = inner * self.signs
        return self._kronecker(moved, transposed=False)

    def apply_outputs(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight whose outputs are the old ones times Q: float64 [size, in] → Q^T `weight`."""
        return self.apply(weight.t()).t().contiguous()

    def matrix(self) -> torch.Tensor:
        """Q itself, float64 [size, size]."""
        return self.apply(torch.eye(self.size, dtype=torch.float64))

    def _kronecker(self, values: torch.Tensor, transposed: bool) -> torch.Tensor:
        shape = values.shape
        out = values.reshape(-1, *(f.shape[0] for f in self.factors))
        for axis, factor in enumerate(self.factors, start=1):
            out = (out.movedim(axis, -1) @ (factor.t() if transposed else factor)).movedim(-1, axis)
        return out.reshape(shape)


def _random_signs(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (size,), generator=generator, dtype=torch.float64) * 2 - 1
