"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounding that lets later columns make up for the error of earlier ones.

For a layer with inputs x the quadratic loss of a weight change E is `tr(E H E^T)` with the Hessian `H = mean(x x^T)`.
Columns are rounded one at a time; after each the columns not yet rounded move to the minimum of the loss given the
columns fixed so far. With U the upper triangular factor of `H^-1 = U^T U` the step for column i is
`e = (w_i - q_i) / U_ii` and `w_j -= U_ij e` for all j > i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ...runtime.kernels.calibration import round_columns
from ...runtime.kernels.packed import QuantScheme
from .factor import FactoredHessian, NotPositiveDefinite, permute_rows
from .grid import minmax_grid, search_grid, to_groups
from .rtn import Quantized

__all__ = ["NotPositiveDefinite", "inverse_factor", "matched_weight", "quantize_gptq", "quantize_stack"]

FITTED = 1 << 20
"""Weights whose grids are searched at once, so that the weight is copied in parts only."""


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

    Columns whose inputs were always zero are rounded to nearest and affect no other. In activation order without static
    groups a group is a run of columns in that order, and the result has their `g_idx`. Raises NotPositiveDefinite, and
    ValueError where the group size does not divide K.
    """
    (result,) = quantize_stack(
        [weight],
        FactoredHessian(hessian.clone()),
        scheme,
        dtype,
        desc_act=desc_act,
        static_groups=static_groups,
        damping=damping,
        search_steps=search_steps,
        block_size=block_size,
    )
    return result


def quantize_stack(
    weights: Sequence[torch.Tensor],
    hessian: FactoredHessian,
    scheme: QuantScheme,
    dtype: torch.dtype,
    *,
    desc_act: bool,
    static_groups: bool,
    damping: float,
    search_steps: int,
    block_size: int,
) -> list[GPTQResult]:
    """The same for layers with the same inputs, each [N_i, K], as one problem: their rows are independent.

    hessian: theirs, factorized here unless it is already. Beside it one float32 copy of the weights is held.
    """
    columns = weights[0].shape[1]
    num_groups = scheme.num_groups(columns)
    size = columns // num_groups
    used, order = hessian.factorize(damping, by_activation=desc_act), hessian.order
    moving = order is not None and not static_groups
    work = _transposed(weights)
    importance = hessian.diagonal[order] if moving else hessian.diagonal
    grid = _Grid(scheme, dtype, num_groups, work.shape[1], importance, search_steps, work.device)
    if static_groups:
        for start in range(0, num_groups, step := max(1, FITTED // (size * work.shape[1]))):
            grid.fit(range(start, min(start + step, num_groups)), work)
    if order is not None:
        permute_rows(work, order)
    group_list = [column // size for column in (range(columns) if order is None or moving else order.tolist())]

    codes = torch.empty_like(work, dtype=torch.uint8)
    for start, stop in _blocks(columns, block_size, None if static_groups else size):
        if not static_groups and start % size == 0:
            grid.fit([start // size], work)
        _round_block(work, hessian.matrix, grid, group_list, codes, start, stop)
    del work
    dead, g_idx = int(hessian.dead.sum()), None
    if order is not None and moving and num_groups > 1:
        g_idx = torch.empty(columns, dtype=torch.int32, device=codes.device)
        g_idx[order] = torch.arange(columns, dtype=torch.int32, device=codes.device) // size
    parts = _split(codes, order, grid, [len(weight) for weight in weights])
    return [GPTQResult(part if g_idx is None else replace(part, g_idx=g_idx), used, dead) for part in parts]


def _transposed(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all weights as columns, float32 [K, N]."""
    first = weights[0]
    work = torch.empty(first.shape[1], sum(map(len, weights)), device=first.device)
    start = 0
    for weight in weights:
        work[:, start : start + len(weight)] = weight.t()
        start += len(weight)
    return work


def _split(codes: torch.Tensor, order: torch.Tensor | None, grid: _Grid, rows: list[int]) -> list[Quantized]:
    """Each layer's share of codes uint8 [K, N], whose columns of the weight are in `order`."""
    back = None if order is None else torch.argsort(order)
    scales, zeros = grid.result()
    parts, start = [], 0
    for count in rows:
        own = codes[:, start : start + count] if back is None else codes[:, start : start + count].index_select(0, back)
        taken = slice(start, start + count)
        parts.append(Quantized(own.t().contiguous(), scales[taken], None if zeros is None else zeros[taken]))
        start += count
    return parts


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

    damping, dead: see `FactoredHessian`; order: a permutation applied first. The Hessian is left as it is. Raises
    NotPositiveDefinite where damping above 1 would be needed.
    """
    factored = FactoredHessian(hessian.clone(), dead)
    if order is not None:
        factored.reorder(order)
    used = factored.factorize(damping)
    return factored.matrix.triu_(), used


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
        """Choose the grids of `groups` for the current weights `work` [K, N], columns in the order of their groups."""
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
    """Round columns start … stop - 1 of `work` [K, N] into `codes`, then correct all later columns at once.

    factor: [K, K], of which what is on and above the diagonal is read.
    """
    errors = torch.empty(stop - start, work.shape[1], dtype=work.dtype, device=work.device)
    groups, inner = group_list[start:stop], factor[start:stop, start:stop]
    arguments = (work[start:stop], inner, grid.scales, grid.zeros, groups, grid.top, codes[start:stop], errors)
    if not round_columns(*arguments):
        _round_columns(*arguments)
    if stop < work.shape[0]:
        work[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)


def _round_columns(
    work: torch.Tensor,
    factor: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: list[int],
    top: float,
    codes: torch.Tensor,
    errors: torch.Tensor,
) -> None:
    """Round the columns of a block, rows of `work` [C, N], one after another; see `calibration.round_columns`.

    Products and differences are rounded one by one, as the native kernel rounds them, so that both give the same bits.
    """
    steps, single_zero = factor.diagonal().tolist(), zeros.shape[0] == 1
    rounded = torch.empty_like(work[0])
    for i, group in enumerate(groups):
        scale, zero = scales[group], zeros[0 if single_zero else group]
        code = torch.div(work[i], scale, out=rounded).round_().add_(zero).clamp_(0.0, top)
        codes[i] = code
        torch.sub(code, zero, out=errors[i]).mul_(scale)
        torch.sub(work[i], errors[i], out=errors[i]).div_(steps[i])
        work[i + 1 :] -= factor[i, i + 1 :, None] * errors[i]
