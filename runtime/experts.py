"""Mixture-of-experts blocks as single linear layers, so that each can be quantized, stored and read by itself.

transformers holds the experts of a block stacked, `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I] (or transposed,
interleaved, with biases, without a gate: `Layout`), while most checkpoints have linear layers for each expert,
`experts.0.gate_proj` and so on. `split_experts` puts the latter in the place of the former. Quantized ones keep those
names, which is where vLLM looks for them, and transformers, which stacks what it decompresses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .kernels.packed import WeightHolder


class Leaves(NamedTuple):
    """Names of an expert's layers; `gate` is empty where it has none."""

    gate: str
    up: str
    down: str


LLAMA = Leaves("gate_proj", "up_proj", "down_proj")
MIXTRAL = Leaves("w1", "w3", "w2")
UNGATED = Leaves("", "up_proj", "down_proj")


@dataclass(frozen=True)
class Layout:
    """How a module holds its experts: E of them, hidden size H, inner size I.

    transposed: weights are [E, in, out] in place of [E, out, in]; interleaved: rows of gate and up take turns; sorted:
    called with the rows of every expert one after another, those that are not sent to it zero, as llama4 does.
    """

    num_experts: int
    hidden: int
    inner: int
    gated: bool = True
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    sorted: bool = False

    @property
    def first(self) -> str:
        """The parameter that holds gate and up."""
        return "gate_up_proj" if self.gated else "up_proj"

    def rows(self, leaf: str) -> tuple[str, slice]:
        """Of `gate`, `up` or `down`: the parameter that holds it, and its rows there."""
        if leaf == "down":
            return "down_proj", slice(None)
        if not self.gated:
            return self.first, slice(None)
        if self.interleaved:
            return self.first, slice(0 if leaf == "gate" else 1, None, 2)
        return self.first, slice(0, self.inner) if leaf == "gate" else slice(self.inner, None)

    @property
    def parameters(self) -> list[str]:
        """Names of the stacked parameters."""
        return [self.first, "down_proj", *([f"{self.first}_bias", "down_proj_bias"] if self.bias else [])]

    def parts(self, leaves: Leaves) -> Iterator[tuple[str, str, str, slice]]:
        """Of every tensor of an expert: layer, `weight` or `bias`, the stacked parameter, and its rows there."""
        for leaf, role in zip(leaves, leaves._fields):
            if leaf:
                owner, rows = self.rows(role)
                yield leaf, "weight", owner, rows
                if self.bias:
                    yield leaf, "bias", f"{owner}_bias", rows

    def shapes(self, leaves: Leaves) -> dict[str, tuple[int, int]]:
        """Layer → (out_features, in_features)."""
        found = {leaves.gate: (self.inner, self.hidden), leaves.up: (self.inner, self.hidden)}
        return {name: shape for name, shape in {**found, leaves.down: (self.hidden, self.inner)}.items() if name}


class Expert(nn.Module):
    """One expert's layers, under the names that checkpoints give them; `Experts` runs them."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


class Experts(nn.Module):
    """A block's experts, called as transformers calls its stacked ones: `(hidden [T, H], index [T, k], weight [T, k])`,
    or, where the layout is `sorted`, `(hidden [E * T, H])`.

    An expert that no token chose is not run. index: int64; numbers beyond the experts stand for none.
    """

    shell: Any
    """The stacked module without its parameters: what is left computes the gate."""

    def __init__(self, stacked: nn.Module, layout: Layout, experts: Sequence[Expert], leaves: Leaves) -> None:
        super().__init__()
        self.num_experts, self.layout, self.leaves = len(experts), layout, leaves
        shell = copy.copy(stacked)
        shell._parameters = {}
        object.__setattr__(self, "shell", shell)  # no submodule: it has nothing to store
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        if top_k_index is None or top_k_weights is None:
            per_expert = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
            for number, rows in enumerate(per_expert):
                sent = rows.any(dim=-1).nonzero()[:, 0]
                if len(sent):
                    output.view_as(per_expert)[number, sent] = self._run(number, rows[sent])
            return output
        for number in top_k_index.unique().tolist():
            if number >= self.num_experts:
                continue
            token, place = torch.where(top_k_index == number)
            values = self._run(number, hidden_states[token])
            output.index_add_(0, token, (values * top_k_weights[token, place, None]).to(output.dtype))
        return output

    def _run(self, number: int, inputs: torch.Tensor) -> torch.Tensor:
        layers: Any = self._modules[str(number)]
        layers = layers._modules
        up = layers[self.leaves.up]
        if not self.leaves.gate:
            return layers[self.leaves.down](self.shell.act_fn(up(inputs)))
        return layers[self.leaves.down](self._gate(layers[self.leaves.gate](inputs), up(inputs)))

    def _gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What enters the last layer, by the architecture's own code where it has some."""
        own = getattr(self.shell, "_apply_gate", None)
        if own is None or _is_default(own):
            return self.shell.act_fn(gate) * up
        if self.layout.interleaved:
            return own(torch.stack((gate, up), dim=-1).flatten(-2))
        return own(torch.cat((gate, up), dim=-1))


def find_stacked(model: nn.Module) -> dict[str, nn.Module]:
    """Name and module of every block of stacked experts whose layout is known."""
    return {name: module for name, module in model.named_modules() if layout_of(module) is not None}


def layout_of(module: nn.Module) -> Layout | None:
    """How a module holds stacked experts; None where it holds none, or in no way that is known."""
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    gated = "gate_up_proj" in parameters
    first = "gate_up_proj" if gated else "up_proj"
    bias = f"{first}_bias" in parameters
    names = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if bias else set())
    if set(parameters) != names or any(len(parameters[name]) != 3 for name in (first, "down_proj")):
        return None
    if getattr(module, "has_post_expert_norm", False) or any(
        True for child in module.children() for _ in child.parameters()
    ):
        return None
    llama4 = type(module).__name__ == "Llama4TextExperts"
    transposed = bool(getattr(module, "is_transposed", llama4))
    interleaved = not getattr(module, "is_concatenated", True)
    count, hidden, inner = parameters["down_proj"]
    if transposed:
        hidden, inner = inner, hidden
    wide = inner * (1 + gated)
    if parameters[first] != ((count, hidden, wide) if transposed else (count, wide, hidden)):
        return None
    own_gate = getattr(module, "_apply_gate", None)
    default = own_gate is None or _is_default(own_gate)
    if not hasattr(module, "act_fn") and (default or not gated):
        return None
    if default and interleaved:  # transformers' own function takes halves
        return None
    return Layout(count, hidden, inner, gated, transposed, interleaved, bias, sorted=llama4)


def expert_shapes(name: str, module: nn.Module, leaves: Leaves | None = None) -> dict[str, tuple[int, int]]:
    """Name → (out_features, in_features) of the linear layers that `module`, called `name`, is split into."""
    layout = _known(module)
    shapes = layout.shapes(leaves or _leaves(layout))
    return {f"{name}.{number}.{leaf}": shape for number in range(layout.num_experts) for leaf, shape in shapes.items()}


def split_experts(model: nn.Module, names: Iterable[str] | Mapping[str, Leaves] | None = None) -> list[str]:
    """Replace stacked experts, all or the named modules, by single layers; returns their names.

    names: where it is a mapping, how the layers are called. They share the memory of the stacked weights, but for
    transposed ones, which are copied one module after another.
    """
    found = find_stacked(model)
    chosen: dict[str, Leaves] = {}
    for name in found if names is None else names:
        given = names[name] if isinstance(names, Mapping) else None
        chosen[name] = given or _leaves(_known(found[name]))
    for name, leaves in chosen.items():
        stacked: Any = found.pop(name)
        layout = _known(stacked)
        experts = [
            Expert({leaf: _layer(stacked, layout, number, role) for leaf, role in zip(leaves, leaves._fields) if leaf})
            for number in range(layout.num_experts)
        ]
        model.set_submodule(name, Experts(stacked, layout, experts, leaves).train(stacked.training))
    return list(chosen)


def stack_experts(model: nn.Module) -> list[str]:
    """Undo `split_experts` where all layers of a module are plain; returns the modules' names."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
    stacked = []
    for name, module in found:
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        if len(layers) != module.num_experts * len(module.layout.shapes(module.leaves)):
            continue
        model.set_submodule(name, _stack(module).train(module.training))
        stacked.append(name)
    return stacked


def stored_singly(names: Iterable[str], stacked: Iterable[str]) -> dict[str, Leaves]:
    """Those of the `stacked` modules whose experts have tensors of their own among the `names` of a checkpoint (as
    modules call them), and how their layers are called there."""
    first: dict[str, set[str]] = {}
    for name in names:
        parts = name.rsplit(".", 3)
        if len(parts) == 4 and parts[1] == "0":
            first.setdefault(parts[0], set()).add(parts[2])
    found = {}
    for name in stacked:
        leaves = next((k for k in (LLAMA, MIXTRAL, UNGATED) if {x for x in k if x} == first.get(name)), None)
        if leaves is not None:
            found[name] = leaves
    return found


def plain_experts(model: nn.Module) -> list[str]:
    """Names of blocks of experts that are not quantized: stacked ones, and those of single plain layers."""
    single = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Experts) and not any(isinstance(layer, WeightHolder) for layer in module.modules())
    ]
    return [*find_stacked(model), *single]


def leaves_among(names: Iterable[str], name: str, module: nn.Module) -> Leaves | None:
    """How the layers of the experts of `module`, called `name`, are called among the `names` of layers; None where they
    are not there."""
    inside = {other.rpartition(".")[2] for other in names if other.startswith(f"{name}.")}
    known = (LLAMA, MIXTRAL) if _known(module).gated else (UNGATED,)
    return next((leaves for leaves in known if inside and inside <= set(leaves)), None)


def _known(module: nn.Module) -> Layout:
    layout = layout_of(module)
    if layout is None:
        raise ValueError(f"{type(module).__name__} holds no stacked experts of a known layout")
    return layout


def _leaves(layout: Layout) -> Leaves:
    return LLAMA if layout.gated else UNGATED


def _is_default(gate: Callable[..., Any]) -> bool:
    """Whether it is transformers' own gate, `act_fn(gate) * up` of halves."""
    return getattr(gate, "__name__", "") == "_default_apply_gate"


def _layer(stacked: Any, layout: Layout, number: int, leaf: str) -> nn.Linear:
    """One expert's layer over the stacked weights, untouched by random numbers."""
    owner, rows = layout.rows(leaf)
    held = getattr(stacked, owner).detach()[number]
    weight = held.t()[rows] if layout.transposed else held[rows]
    bias = getattr(stacked, f"{owner}_bias").detach()[number][rows] if layout.bias else None
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    return linear


def _stack(module: Experts) -> nn.Module:
    """transformers' own module with the weights of the single layers."""
    layout, stacked = module.layout, copy.copy(module.shell)
    stacked._parameters = {}
    for parameter in (layout.first, "down_proj"):
        for kind in ("weight", "bias") if layout.bias else ("weight",):
            experts = [_rows(module, number, parameter, kind) for number in range(module.num_experts)]
            whole = torch.stack([x.t() for x in experts] if layout.transposed and kind == "weight" else experts)
            own = parameter if kind == "weight" else f"{parameter}_bias"
            stacked.register_parameter(own, nn.Parameter(whole, requires_grad=False))
    return stacked


def _rows(module: Experts, number: int, parameter: str, kind: str) -> torch.Tensor:
    """Of one expert, what `parameter` holds, in the order of its rows: [out, in] or [out]."""
    layers: Any = module._modules[str(number)]
    leaves = module.leaves
    if parameter == "down_proj" or not module.layout.gated:
        return getattr(layers._modules[leaves.down if parameter == "down_proj" else leaves.up], kind).detach()
    gate, up = (getattr(layers._modules[name], kind).detach() for name in (leaves.gate, leaves.up))
    return torch.stack((gate, up), dim=1).flatten(0, 1) if module.layout.interleaved else torch.cat((gate, up))
