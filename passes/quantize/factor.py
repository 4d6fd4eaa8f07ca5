"""A layer's Hessian and the triangular factor of its damped inverse, both in one square buffer.

A Hessian is symmetric, so that one triangle holds it: what lies below the diagonal stays the Hessian's, and what lies
on and above it is overwritten, panel by panel, by the factor. A wide layer's Hessian is the largest matrix of a whole
run (256 MiB for 8,192 inputs), and this way it is there once. Temporaries are panels of `PANEL` columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...runtime.tensor_files import all_finite

DAMPING_FACTOR = 2.0
MAX_DAMPING = 1.0
PANEL = 256
"""Columns that are worked on at once."""


class NotPositiveDefinite(ArithmeticError):
    """The Hessian does not factorize, even with the largest damping."""


class FactoredHessian:
    """The loss `tr(E H E^T)` of a weight change E of one layer, and what rounding needs of H.

    matrix: float32 [K, K], symmetric, given in full; it is taken over. diagonal: that of H, float32 [K], in the order
    of the layer's inputs. dead: bool [K], inputs that were always zero. order: the permutation in which the matrix is
    kept, None for the inputs' own. damping: share of the mean diagonal with which H was factorized, None until then.
    """

    def __init__(self, matrix: torch.Tensor, dead: torch.Tensor | None = None) -> None:
        self.matrix, self.diagonal = matrix, matrix.diagonal().clone()
        self.dead = self.diagonal == 0 if dead is None else dead
        self.order: torch.Tensor | None = None
        self.damping: float | None = None

    def factorize(self, damping: float, by_activation: bool = False) -> float:
        """Let the upper triangle be U, with `U^T U` the inverse of the damped Hessian; returns the damping used.

        damping: share of the mean diagonal that is added; doubled, up to 1, until the factorization succeeds. Dead
        inputs get that mean as their diagonal. by_activation: columns with the largest inputs first. A second call
        changes nothing. Raises NotPositiveDefinite where damping above 1 would be needed.
        """
        if self.damping is not None:
            return self.damping
        if by_activation:
            self.reorder(torch.argsort(self.diagonal, descending=True, stable=True))
        mean = self.diagonal.mean()
        unit = torch.where(mean > 0, mean, torch.ones_like(mean))
        base = self._ordered(torch.where(self.dead, unit, self.diagonal))
        while self.damping is None:
            mirror_lower(self.matrix)
            self.matrix.diagonal().copy_(base + damping * unit)
            if _take_root(self.matrix) and _invert(self.matrix):
                self.damping = damping
            elif damping >= MAX_DAMPING:
                raise NotPositiveDefinite("the Hessian is not positive definite")
            else:
                damping = min(damping * DAMPING_FACTOR, MAX_DAMPING)
        return self.damping

    def reorder(self, order: torch.Tensor) -> None:
        """Keep the matrix in this order of the inputs, int64 [K], from now on; before it is factorized."""
        permute_rows(self.matrix, order)
        for start, stop in panels(len(self.matrix)):
            self.matrix[start:stop] = self.matrix[start:stop].index_select(1, order)
        self.order = order

    def energy(self, rows: torch.Tensor) -> torch.Tensor:
        """`m H m^T` of every row m of `rows`, float32 [N, K] in the order of the inputs; float32 [N]."""
        rows = rows if self.order is None else rows.index_select(1, self.order)
        total = rows.square() @ self._ordered(self.diagonal)
        for start, stop in panels(len(self.matrix)):
            part = rows[:, start:stop]
            product = part @ self.matrix[start:stop, start:stop].tril(-1)
            if stop < len(self.matrix):
                product.addmm_(rows[:, stop:], self.matrix[stop:, start:stop])
            total.add_(product.mul_(part).sum(1), alpha=2)
        return total

    def _ordered(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.order is None else values[self.order]


def panels(length: int) -> Iterator[tuple[int, int]]:
    """Beginning and end of each panel."""
    for start in range(0, length, PANEL):
        yield start, min(start + PANEL, length)


def mirror_lower(matrix: torch.Tensor) -> torch.Tensor:
    """Overwrite what is above the diagonal of a square matrix by what is below it."""
    for start, stop in panels(len(matrix)):
        matrix[start:stop, stop:] = matrix[stop:, start:stop].t()
        square = matrix[start:stop, start:stop].tril_()
        square += torch.tril(square, -1).t()
    return matrix


def permute_rows(matrix: torch.Tensor, order: torch.Tensor) -> None:
    """`matrix = matrix[order]`, float32 [K, N] in place, some columns at a time."""
    for start, stop in panels(matrix.shape[1]):
        matrix[:, start:stop] = matrix[:, start:stop].index_select(0, order)


def _take_root(matrix: torch.Tensor) -> bool:
    """Overwrite the upper triangle, that of a symmetric A, by the upper triangular R with `A = R R^T`.

    From the last panel to the first, because R^-1 is then the factor U of the inverse: `U^T U = (R R^T)^-1`. False
    where A is not positive definite.
    """
    for start, stop in reversed(list(panels(len(matrix)))):
        block = matrix[start:stop, start:stop]
        upper = block.triu()
        # Reversing rows and columns turns the lower factor that the library gives into the upper one.
        lower, info = torch.linalg.cholesky_ex((upper + upper.triu(1).t()).flip(0, 1))
        if int(info) != 0:
            return False
        root = lower.flip(0, 1)
        block.tril_(-1).add_(root)
        if not start:
            continue
        above = torch.linalg.solve_triangular(root.t(), matrix[:start, start:stop], upper=False, left=False)
        matrix[:start, start:stop] = above
        for column, end in panels(start):
            own = above[column:end]
            matrix[:column, column:end].addmm_(above[:column], own.t(), alpha=-1)
            matrix[column:end, column:end].sub_((own @ own.t()).triu_())
    return True


def _invert(matrix: torch.Tensor) -> bool:
    """Overwrite the upper triangle R by that of its inverse; False where a value is not finite."""
    for start, stop in panels(len(matrix)):
        block = matrix[start:stop, start:stop]
        unit = torch.eye(stop - start, dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(block.triu(), unit, upper=True)
        right = matrix[:start, start:stop] @ inverse
        for row, end in panels(start):
            part = matrix[row:end, row:end].triu() @ right[row:end]
            if end < start:
                part.addmm_(matrix[row:end, end:start], right[end:])
            matrix[row:end, start:stop] = part.neg_()
        block.tril_(-1).add_(inverse)
        if not all_finite(matrix[:stop, start:stop]):
            return False
    return True
