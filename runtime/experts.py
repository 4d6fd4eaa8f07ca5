"""Mixture-of-experts blocks as single linear layers, so that each can be quantized, stored and read by itself.

transformers holds the experts of a block stacked, `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I], while
checkpoints have three linear layers an expert, `experts.0.gate_proj` and so on. `split_experts` puts the latter in the
place of the former. Quantized ones keep those names, which is where vLLM looks for them, and transformers, which stacks
what it decompresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from .kernels.packed import QuantScheme


class Expert(nn.Module):
    """One expert's layers; `Experts` runs them."""

    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj


class Experts(nn.Module):
    """A block's experts, called as transformers calls its stacked ones: `(hidden [T, H], index [T, k], weight [T, k])`.

    An expert that no token chose is not run. index: int64; numbers beyond the experts stand for none.
    """

    def __init__(self, experts: Sequence[Expert], act_fn: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = len(experts), act_fn
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            if number >= self.num_experts:
                continue
            expert: Any = self._modules[str(number)]
            token, place = torch.where(top_k_index == number)
            inputs = hidden_states[token]
            values = expert.down_proj(self.act_fn(expert.gate_proj(inputs)) * expert.up_proj(inputs))
            output.index_add_(0, token, (values * top_k_weights[token, place, None]).to(output.dtype))
        return output


def find_stacked(model: nn.Module) -> dict[str, nn.Module]:
    """Name and module of every block of stacked experts whose layout is `gate_up_proj` and `down_proj`, no biases."""
    return {name: module for name, module in model.named_modules() if _is_stacked(module)}


def _is_stacked(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if up.dim() != 3 or down.dim() != 3 or getattr(module, "is_transposed", False):
        return False
    count, hidden, inner = down.shape
    return tuple(up.shape) == (count, 2 * inner, hidden)


def expert_shapes(name: str, module: nn.Module) -> dict[str, tuple[int, int]]:
    """Name → (out_features, in_features) of the linear layers that `module`, called `name`, is split into."""
    count, hidden, inner = cast(torch.Tensor, module.down_proj).shape
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{name}.{number}.{leaf}": shape for number in range(count) for leaf, shape in shapes.items()}


def split_experts(model: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """Replace stacked experts, all or the named modules, by single layers over the same memory; returns their names."""
    found = find_stacked(model)
    chosen = list(found) if names is None else list(names)
    for name in chosen:
        stacked: Any = found[name]
        inner = stacked.down_proj.shape[2]
        experts = [
            Expert(_linear(both[:inner]), _linear(both[inner:]), _linear(down))
            for both, down in zip(stacked.gate_up_proj.detach().unbind(), stacked.down_proj.detach().unbind())
        ]
        model.set_submodule(name, Experts(experts, stacked.act_fn).train(stacked.training))
    return chosen


def stored_singly(names: Iterable[str], stacked: Iterable[str]) -> list[str]:
    """Those of the `stacked` modules whose experts have tensors of their own among the `names` of a checkpoint."""
    prefixes = {name.rsplit(".", 3)[0] for name in names if ".0.gate_proj." in name}
    return [name for name in stacked if name in prefixes]


def unreadable_experts(schemes: Iterable[QuantScheme]) -> str:
    """Why transformers could not read experts in these schemes, one each; empty where it can.

    While it stacks them it decompresses them, all by one scheme, and knows neither zero points nor nvfp4's divisor nor
    int8 weights with int8 inputs nor blocks there. The inputs of float8 experts it leaves as they are.
    """
    distinct = set(schemes)
    if len(distinct) > 1:
        return f"experts in {len(distinct)} schemes cannot be loaded by transformers: give all of them one scheme"
    for scheme in distinct:
        plain = scheme.format == "pack-quantized" and scheme.symmetric
        channels = scheme.format == "float-quantized" and scheme.group_size == -1
        if not (plain or channels or scheme.format == "mxfp4-pack-quantized"):
            return (
                "experts in this scheme cannot be loaded by transformers: use a symmetric one without int8 "
                "activations, fp8 with a scale a channel, or mxfp4, or keep the experts (`experts: keep`)"
            )
    return ""


def _linear(weight: torch.Tensor) -> nn.Linear:
    """A linear layer over the weight [N, K], without a copy and untouched by random numbers."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
