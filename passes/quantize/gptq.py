"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounding that lets later columns make up for the error of earlier ones.

For a layer with inputs x the quadratic loss of a weight change E is `tr(E H E^T)` with the Hessian `H = mean(x x^T)`.
Columns are rounded one at a time; after each the columns not yet rounded move to the minimum of the loss given the
columns fixed so far. With U the upper triangular factor of `H^-1 = U^T U` the step for column i is
`e = (w_i - q_i) / U_ii` and `w_j -= U_ij e` for all j > i.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from ...runtime.kernels.packed import QuantScheme
from ...runtime.tensor_files import all_finite
from .grid import minmax_grid, search_grid, to_groups
from .rtn import Quantized

DAMPING_FACTOR = 2.0
MAX_DAMPING = 1.0
FITTED = 16
"""Groups whose grids are searched at once, so that the weight is copied in parts only."""


class NotPositiveDefinite(ArithmeticError):
    """The Hessian does not factorize, even with the largest damping."""


@dataclass(frozen=True)
class GPTQResult:
    """quantized: the codes and grids; damping: the share of the mean diagonal used; dead: columns without inputs."""

    quantized: Quantized
    damping: float
    dead: int


def quantize_gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scheme: QuantScheme,
    dtype: torch.dtype,
    *,
    desc_act: bool = True,
    static_groups: bool = True,
    damping: float = 0.01,
    search_steps: int = 16,
    block_size: int = 64,
) -> GPTQResult:
    """Quantize `weight` [N, K] (any floating dtype) given `hessian` float32 [K, K]; scales are stored in `dtype`.

    Columns whose inputs were always zero are rounded to nearest and affect no other. Rows are independent: layers with
    the same inputs may be stacked. Raises NotPositiveDefinite, and ValueError where the group size does not divide K or
    activation order is asked for without static groups.
    """
    if desc_act and not static_groups:
        raise ValueError("activation order needs static groups")
    columns = weight.shape[1]
    num_groups = scheme.num_groups(columns)
    size = columns // num_groups
    diagonal = hessian.diagonal()
    dead = diagonal == 0

    work = weight.float().t().contiguous()
    order = torch.argsort(diagonal, descending=True, stable=True) if desc_act else None
    factor, used = inverse_factor(hessian, dead, damping, order)
    grid = _Grid(scheme, dtype, num_groups, weight.shape[0], diagonal, search_steps, weight.device)
    if static_groups:
        for start in range(0, num_groups, FITTED):
            grid.fit(range(start, min(start + FITTED, num_groups)), work)
    if order is not None:
        work = work[order]
    group_list = [column // size for column in (range(columns) if order is None else order.tolist())]

    codes = torch.empty_like(work, dtype=torch.uint8)
    for start, stop in _blocks(columns, block_size, None if static_groups else size):
        if not static_groups and start % size == 0:
            grid.fit([start // size], work)
        _round_block(work, factor, grid, group_list, codes, start, stop)
    if order is not None:
        restored = torch.empty_like(codes)
        restored[order] = codes
        codes = restored
    quantized = Quantized(codes.t().contiguous(), *grid.result())
    return GPTQResult(quantized, used, int(dead.sum()))


def matched_weight(
    weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, damping: float, strength: float = 1.0
) -> torch.Tensor:
    """The weight whose output on the quantized model's inputs x comes closest to W's on the original's inputs y.

    weight: [N, K], any floating dtype; hessian: `mean(x x^T)` and cross: `mean(y x^T)`, float32 [K, K]. Minimizing
    `|W y - V x|^2` gives `V = W + W (cross - hessian) hessian^-1`; rounding V instead of W lets a layer make up for the
    errors of all layers before it (the objective of GPTAQ, Li et al. 2025, arXiv:2504.02692, solved before rounding).
    damping: as in `quantize_gptq`; strength: share of the correction that is applied. Returns float32 [N, K]. Raises
    NotPositiveDefinite as `inverse_factor` does.
    """
    factor, _ = inverse_factor(hessian, hessian.diagonal() == 0, damping)
    values = weight.float()
    shift = values @ (cross - hessian)
    return values + strength * ((shift @ factor.t()) @ factor)


def inverse_factor(
    hessian: torch.Tensor, dead: torch.Tensor, damping: float, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, float]:
    """The upper triangular U, float32 [K, K], with `U^T U` the inverse of the damped Hessian, and the damping used.

    damping: share of the mean diagonal that is added; doubled until the Cholesky factorization succeeds. dead: bool
    [K], columns that get that mean as their diagonal. order: a permutation applied first.
    Raises NotPositiveDefinite where damping above 1 would be needed.
    """
    mean = hessian.diagonal().mean()
    unit = torch.where(mean > 0, mean, torch.ones_like(mean))
    # Reversing rows and columns turns the factor of H into that of its inverse: no explicit inverse is formed.
    index = torch.arange(len(hessian), device=hessian.device) if order is None else order
    index = index.flip(0)
    base = torch.where(dead, unit, hessian.diagonal())[index]
    while damping <= MAX_DAMPING:
        inverse = _inverse_root(hessian, index, base + damping * unit)
        if inverse is not None:
            inverse = inverse.flip(0, 1)  # frees the other before the copy below
            return inverse.contiguous(), damping
        damping *= DAMPING_FACTOR
    raise NotPositiveDefinite("the Hessian is not positive definite")


def _inverse_root(hessian: torch.Tensor, index: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor | None:
    """The inverse of the lower Cholesky factor of the Hessian, reordered by `index`, with `diagonal` as its own.

    None where it does not factorize. Two matrices of the Hessian's size are held beside it, which is left as it is.
    """
    matrix = hessian.index_select(0, index)
    torch.index_select(matrix.clone(), 1, index, out=matrix)
    matrix.diagonal().copy_(diagonal)
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix, out=(matrix, info))
    if int(info) != 0:
        return None
    inverse = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device).t()
    torch.linalg.solve_triangular(matrix, inverse, upper=False, out=inverse)
    return inverse if all_finite(inverse) else None


class _Grid:
    """Scales and zero points of all groups, kept with groups first so that a group's row is contiguous."""

    def __init__(
        self,
        scheme: QuantScheme,
        dtype: torch.dtype,
        num_groups: int,
        rows: int,
        importance: torch.Tensor,
        search_steps: int,
        device: torch.device,
    ) -> None:
        self.scheme, self.dtype, self.search_steps = scheme, dtype, search_steps
        self.importance = importance.view(num_groups, -1)
        self.scales = torch.ones(num_groups, rows, device=device)
        middle = float(2 ** (scheme.bits - 1))
        self.zeros = torch.full((1 if scheme.symmetric else num_groups, rows), middle, device=device)
        self.top = float(2**scheme.bits - 1)

    def fit(self, groups: range | list[int], work: torch.Tensor) -> None:
        """Choose the grids of `groups` for the current weights `work` [K, N], columns in plain order."""
        index = list(groups)
        size = self.importance.shape[1]
        part = work[index[0] * size : (index[-1] + 1) * size]
        values = to_groups(part.t().contiguous(), len(index))
        bits, symmetric = self.scheme.bits, self.scheme.symmetric
        if self.search_steps > 0:
            chosen = self.importance[index[0] : index[-1] + 1]
            scales, zeros = search_grid(values, bits, symmetric, self.dtype, chosen, self.search_steps)
        else:
            scales, zeros = minmax_grid(values, bits, symmetric, self.dtype)
        self.scales[index[0] : index[-1] + 1] = scales.t()
        if zeros is not None:
            self.zeros[index[0] : index[-1] + 1] = zeros.t().float()

    def result(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales in the stored dtype [N, G] and zero points uint8 [N, G] or None."""
        zeros = None if self.scheme.symmetric else self.zeros.t().to(torch.uint8).contiguous()
        return self.scales.t().to(self.dtype).contiguous(), zeros


def _blocks(columns: int, block_size: int, group_size: int | None) -> list[tuple[int, int]]:
    """Ranges of at most `block_size` columns that do not cross a group of `group_size` columns."""
    edges = {*range(0, columns, block_size), columns}
    if group_size is not None:
        edges.update(range(0, columns, group_size))
    return list(pairwise(sorted(edges)))


def _round_block(
    work: torch.Tensor,
    factor: torch.Tensor,
    grid: _Grid,
    group_list: list[int],
    codes: torch.Tensor,
    start: int,
    stop: int,
) -> None:
    """Round columns start … stop - 1 of `work` [K, N] into `codes`, then correct all later columns at once."""
    errors = torch.empty(stop - start, work.shape[1], dtype=work.dtype, device=work.device)
    rounded = torch.empty_like(errors)
    inner = factor[start:stop, start:stop]
    steps = inner.diagonal().tolist()
    by_column = inner.t().contiguous()
    single_zero = grid.zeros.shape[0] == 1
    for i in range(stop - start):
        group = group_list[start + i]
        scale, zero = grid.scales[group], grid.zeros[0 if single_zero else group]
        column = work[start + i]
        if i:
            column = torch.addmv(column, errors[:i].t(), by_column[i, :i], alpha=-1)
        code = torch.div(column, scale, out=rounded[i]).round_().add_(zero).clamp_(0.0, grid.top)
        torch.sub(code, zero, out=errors[i]).mul_(scale)
        torch.sub(column, errors[i], out=errors[i]).div_(steps[i])
    codes[start:stop] = rounded
    if stop < work.shape[0]:
        work[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
