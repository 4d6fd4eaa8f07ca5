"""The error that a method will make in a layer, estimated without quantizing it for every candidate.

The error of a weight change E counts as `sum_n g_n (E S E^T)_nn`: S, float32 [K, K], says how much the model's output
depends on the layer's inputs, g, float32 [N], on its outputs (see `sensitivity.py`). Rounding without data is simply
done. GPTQ need not be: with U the factor of `H^-1 = U^T U` its change is `E = R diag(U)^-1 U`, where R is what rounding
leaves of each column at the moment it is rounded. These remainders are those of rounding to nearest and independent,
nearly, so that `E S E^T` is in the mean `sum_k R_nk^2 (U S U^T)_kk / U_kk^2` (for S = H the trace of Chee et al. 2023,
arXiv:2307.13304, Theorem 1). One factorization then serves all bits and group sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ....runtime.kernels.packed import QuantScheme
from ..apply import energy
from ..awq import activation_scales, search_scales
from ..data_free import METHODS
from ..gptq import inverse_factor
from ..rtn import Quantized, quantize_rtn

if TYPE_CHECKING:
    from ..config import Config

ROWS = 1024
"""Rows whose errors are computed at once, so that temporaries stay small."""


@dataclass
class Inputs:
    """The inputs of layers that read the same tensor: hessian is their mean `x x^T`, metric the matrix S above.

    Both float32 [K, K].
    """

    hessian: torch.Tensor
    metric: torch.Tensor
    _columns: torch.Tensor | None = None

    def scaled(self, columns: torch.Tensor) -> Inputs:
        """Of inputs divided by `columns`, float32 [K]."""
        return Inputs(*(matrix / columns[:, None] / columns for matrix in (self.hessian, self.metric)))

    def gptq_columns(self, config: Config) -> torch.Tensor:
        """`(U S U^T)_kk / U_kk^2` of every column, float32 [K]. Raises NotPositiveDefinite as GPTQ would."""
        if self._columns is None:
            diagonal = self.hessian.diagonal()
            order = torch.argsort(diagonal, descending=True, stable=True) if config.desc_act else None
            factor, _ = inverse_factor(self.hessian, diagonal == 0, config.damping, order)
            metric = self.metric if order is None else self.metric[order][:, order]
            columns = ((factor @ metric) * factor).sum(1) / factor.diagonal().square()
            if order is not None:
                columns = torch.empty_like(columns).index_copy_(0, order, columns)
            self._columns = columns
        return self._columns


def row_errors(
    method: str, weights: Sequence[torch.Tensor], scheme: QuantScheme, inputs: Inputs, config: Config
) -> list[torch.Tensor]:
    """`(E S E^T)_nn` of every row n, float32 [N], for each of the layers, which read the same inputs.

    weights: [N, K], any floating dtype, which is also that of the scales; method: one of `options.AutoMethod`. Raises
    NotPositiveDefinite.
    """
    if method == "awq":
        magnitude = inputs.hessian.diagonal().sqrt()
        channels = torch.arange(len(magnitude), device=magnitude.device)
        layers = [(weight, scheme) for weight in weights]
        steps, dtype = config.scale_steps, weights[0].dtype
        choice = search_scales(layers, inputs.hessian, magnitude, channels, dtype, steps)
        columns = activation_scales(magnitude, choice.exponent)
        scaled = inputs.scaled(columns)
        rounding = _gptq if config.rounding == "gptq" else _nearest
        return [rounding(weight.float() * columns, dtype, scheme, scaled, config) for weight in weights]
    if method == "gptq":
        return [_gptq(weight.float(), weight.dtype, scheme, inputs, config) for weight in weights]
    return [_without_data(method, weight, scheme, inputs, config) for weight in weights]


def _gptq(
    weight: torch.Tensor, dtype: torch.dtype, scheme: QuantScheme, inputs: Inputs, config: Config
) -> torch.Tensor:
    columns = inputs.gptq_columns(config)
    quantized = quantize_rtn(weight, scheme, dtype, config.scale_search, inputs.hessian.diagonal())
    parts = zip(weight.split(ROWS), _dequantized(quantized, scheme.bits))
    return torch.cat([(own - rounded).square_() @ columns for own, rounded in parts])


def _nearest(
    weight: torch.Tensor, dtype: torch.dtype, scheme: QuantScheme, inputs: Inputs, config: Config
) -> torch.Tensor:
    quantized = quantize_rtn(weight, scheme, dtype, config.scale_search, inputs.hessian.diagonal())
    return _energies(weight, quantized, scheme.bits, inputs.metric)


def _without_data(
    method: str, weight: torch.Tensor, scheme: QuantScheme, inputs: Inputs, config: Config
) -> torch.Tensor:
    fused: list[nn.Module] = []
    quantized = METHODS[method](weight, scheme, config.scale_search, fused)
    assert isinstance(quantized, Quantized)
    return _energies(weight.float(), quantized, scheme.bits, inputs.metric)


def _energies(weight: torch.Tensor, quantized: Quantized, bits: int, metric: torch.Tensor) -> torch.Tensor:
    parts = zip(weight.split(ROWS), _dequantized(quantized, bits))
    return torch.cat([energy(own - rounded, metric) for own, rounded in parts])


def _dequantized(quantized: Quantized, bits: int) -> list[torch.Tensor]:
    starts = range(0, len(quantized.codes), ROWS)
    return [quantized.rows(slice(start, start + ROWS)).dequantize(bits) for start in starts]
