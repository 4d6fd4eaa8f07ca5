"""Learned rounding: the codes and scales of a block's layers are moved until the block's outputs come closer.

After its layers are quantized, a decoder block is trained, as SignRound does (Cheng et al. 2023, arXiv:2309.05516), but
by Adam (Kingma and Ba 2015, arXiv:1412.6980) in the place of gradient signs, and with the mean over the second half of
the steps (Polyak and Juditsky 1992) as the result: near the best code a gradient is mostly noise. Each code is the
nearest integer to a latent value; gradients pass the rounding as if it were not there. A latent starts where the
unrounded weight is, as far as its code allows (so that the method before gives the start, and weights near a boundary
cross it first); a group's scale is stretched by a factor that starts at 1.
Inputs are the outputs of the quantized blocks before, the targets what the original block gives on the original inputs,
and a token's squared error counts relative to the mean square of its target, as the norms after the block see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...runtime.kernels.packed import PackedLinear

MARGIN = 0.49
"""Steps that a latent may lie from its code at the start."""
TRAVEL, STRETCH = 1.8, 0.1
"""Sum of the steps, if all were full ones, of a latent (in steps of the grid) and of a scale's factor."""
BETAS = (0.9, 0.95)
"""Decay of Adam's two moments a step."""
EPSILON = 1e-18
"""Adam's: a gradient whose square float32 does not hold (below 1e-19; the largest one before the block's output is 1)
must not be divided by nothing."""
TINY = 1e-30
JUDGED = 32
"""Batches, spread evenly, on which a block's error before and after is taken."""


@dataclass(frozen=True)
class Learned:
    """Mean relative squared error of the block's outputs before and after, and the share of changed codes by layer.
    Where the error did not fall, nothing was changed. At most JUDGED batches tell the errors."""

    error_before: float
    error_after: float
    changed: dict[str, float]


class LatentLinear(nn.Module):
    """A packed layer with a trainable latent for each code, float32 [N, G, C], and a stretch for each scale [N, G, 1].

    values: the weight before rounding, any floating dtype [N, K].
    """

    def __init__(self, packed: PackedLinear, values: torch.Tensor) -> None:
        super().__init__()
        state = packed.quant_state()
        shape = (packed.out_features, state.scales.shape[1], -1)
        self.packed, self.top, self.dtype = packed, float(2**state.bits - 1), state.scales.dtype
        self.start, self.stored_zeros = state.codes, state.zeros
        self.scales = state.scales.float().unsqueeze(-1)
        middle = torch.full_like(self.scales[:1, :1], float(2 ** (state.bits - 1)))
        self.zeros = middle if state.zeros is None else state.zeros.float().unsqueeze(-1)
        codes = state.codes.view(shape).float()
        nonzero = torch.where(self.scales == 0, torch.ones_like(self.scales), self.scales)
        wanted = values.float().view(shape) / nonzero + self.zeros
        self.latent = torch.maximum(torch.minimum(wanted, codes + MARGIN), codes - MARGIN).requires_grad_()
        self.stretch = torch.zeros_like(self.scales).requires_grad_()

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is trained."""
        return self.latent, self.stretch

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weight [N, K], in the dtype of the scales; blocks such as mamba's multiply by it themselves."""
        codes = self.latent + (self.latent.detach().round() - self.latent.detach())
        weight = (codes - self.zeros) * (self.scales * (1 + self.stretch))
        return weight.view(self.packed.out_features, self.packed.in_features).to(self.dtype)

    @property
    def bias(self) -> nn.Parameter | None:
        """The layer's own [N]."""
        return self.packed.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight, self.bias)

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep the codes on the grid."""
        self.latent.clamp_(-MARGIN, self.top + MARGIN)

    @torch.no_grad()
    def codes(self) -> torch.Tensor:
        """uint8 [N, K]."""
        return self.latent.round().clamp_(0, self.top).to(torch.uint8).view_as(self.start)

    @torch.no_grad()
    def pack(self) -> PackedLinear:
        """The packed layer as it is now."""
        scales = (self.scales * (1 + self.stretch)).squeeze(-1).to(self.dtype)
        old: nn.Module = self.packed
        return PackedLinear.from_linear(old, self.codes(), scales, self.stored_zeros, self.packed.scheme)  # type: ignore[arg-type]


Forward = Callable[[int], torch.Tensor]
"""Number of a batch → the block's outputs [B, L, H], or what they should be."""


def learn_rounding(
    block: nn.Module,
    values: Mapping[str, torch.Tensor],
    forward: Forward,
    target: Forward,
    num_batches: int,
    steps: int,
    seed: int,
) -> Learned:
    """Train the packed layers of `block` that `values` names (names inside it), and put the results into it.

    values: weights before rounding [N, K] by name. forward runs the block as it is then. One batch a step, in an order
    that `seed` gives; the rates fall linearly to 0.
    """
    layers = {name: LatentLinear(_packed(block, name), values[name]) for name in values}
    before = _error(forward, target, num_batches)
    for name, layer in layers.items():
        block.set_submodule(name, layer)
    _descend(list(layers.values()), forward, target, num_batches, steps, seed)
    for name, layer in layers.items():
        block.set_submodule(name, layer.pack())
    after = _error(forward, target, num_batches)
    if not after < before:
        for name, layer in layers.items():
            block.set_submodule(name, layer.packed)
        return Learned(before, before, dict.fromkeys(layers, 0.0))
    changed = {name: float((layer.codes() != layer.start).float().mean()) for name, layer in layers.items()}
    return Learned(before, after, changed)


def _packed(block: nn.Module, name: str) -> PackedLinear:
    layer = block.get_submodule(name)
    assert isinstance(layer, PackedLinear)
    return layer


def _descend(
    layers: Sequence[LatentLinear], forward: Forward, target: Forward, num_batches: int, steps: int, seed: int
) -> None:
    leaves = [leaf for layer in layers for leaf in layer.leaves]
    rates = [rate / steps for _ in layers for rate in (TRAVEL, STRETCH)]
    groups = [{"params": [leaf], "lr": rate} for leaf, rate in zip(leaves, rates)]
    optimizer = torch.optim.Adam(groups, betas=BETAS, eps=EPSILON, fused=True)
    averages = [leaf.detach().clone() for leaf in leaves]
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(steps):
        order = order or torch.randperm(num_batches, generator=generator).tolist()
        number = order.pop()
        with torch.enable_grad():
            output = forward(number)
            upstream = _relative(output.detach(), target(number))
            scaled = (upstream / upstream.abs().max().clamp(min=TINY)).to(output.dtype)
            gradients = torch.autograd.grad(output, leaves, scaled, allow_unused=True)
        for leaf, gradient in zip(leaves, gradients):
            # None for an expert that this batch does not reach: it stays. The fused step reads memory, not strides.
            leaf.grad = None if gradient is None else gradient.contiguous()
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        del gradient, gradients  # before the next ones are made
        for layer in layers:
            layer.clamp()
        counted = step - steps // 2 + 1
        if counted > 0:
            for average, leaf in zip(averages, leaves):
                average.lerp_(leaf.detach(), 1 / counted)
    for average, leaf in zip(averages, leaves):
        leaf.detach().copy_(average)


def _relative(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Gradient of half the relative squared error, float32 [B, L, H]."""
    return (output.float() - wanted.float()) / _energy(wanted)


def _energy(wanted: torch.Tensor) -> torch.Tensor:
    """Mean square of each token's target, float32 [B, L, 1]."""
    return wanted.float().square().mean(-1, keepdim=True).clamp(min=TINY)


@torch.no_grad()
def _error(forward: Forward, target: Forward, num_batches: int) -> float:
    """Mean over all tokens, of JUDGED batches at most, of the squared error relative to the target's mean square."""
    total, tokens, judged = 0.0, 0, min(num_batches, JUDGED)
    for number in (i * num_batches // judged for i in range(judged)):
        wanted = target(number)
        error = (forward(number).float() - wanted.float()).square().mean(-1, keepdim=True) / _energy(wanted)
        total, tokens = total + float(error.double().sum()), tokens + error.numel()
    return total / tokens
