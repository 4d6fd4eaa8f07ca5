"""A block run in parts, from each group of layers to the next, so that every layer computes once a batch.

GPTQ fits a layer to the inputs that the quantized layers before it give. Calibrating a block and then running it again
with its quantized layers takes two passes. Here the block is entered anew for each group of layers with the same input:
up to that input, whose Hessian is gathered, and on once the group is quantized. What an earlier part has computed is
not computed again: a module that hands out the output of a layer (the attention that of its output projection) is
replaced by what was kept of that layer, its input at first, then its output; norms whose result only such a module
would read are passed over. `plan_parts` finds out by a trial on one sequence whether a block can be run so: the parts
must give the very bits of the plain block, with every layer computing once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...optimizer.errors import RunError
from ...runtime.decoder_blocks import BlockCall, StopForward
from ...runtime.kernels.packed import PackedLinear
from .live import Stash


@dataclass(frozen=True)
class Part:
    """What ends a part: layers with the same input, by their names in the block, the one called first leading.

    around: the outermost module that returns the output of the group's only layer (perhaps that layer itself); None for
    several layers. rest: what that module returns beside it, None for a plain tensor.
    """

    names: tuple[str, ...]
    around: str | None = None
    rest: tuple[Any, ...] | None = None


@dataclass
class Parts:
    """The parts of one block in order.

    passed: for each part, and for what comes after the last, modules that need not compute on the way there. stash:
    where the batches' results lie between two parts.
    """

    block: nn.Module
    parts: list[Part]
    passed: list[list[str]]
    stash: Stash = field(default_factory=Stash)
    key: int = 0

    def run_to(self, number: int, key: int, call: BlockCall, hidden: torch.Tensor) -> torch.Tensor:
        """The input of part `number`'s layers, with those of all parts before it computing once.

        key: the batch's, under which results are kept from part to part; to be called for one part after another,
        inside `entered`.
        """
        part, found = self.parts[number], []

        def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
            found.append(args[0])
            raise StopForward

        handle = self.block.get_submodule(part.names[0]).register_forward_pre_hook(stop)
        try:
            with suppress(StopForward):
                self.key = key
                call.run(self.block, hidden)
        finally:
            handle.remove()
        if not found:
            raise RunError("a batch did not reach the layer as the first one did", where=part.names[0])
        if part.around is not None:
            self.stash.put(f"{number}-{key}", found[0])
        return found[0]

    def run_through(self, key: int, call: BlockCall, hidden: torch.Tensor) -> torch.Tensor:
        """The block's output, once all parts are done."""
        self.key = key
        return call.run(self.block, hidden)

    @contextmanager
    def entered(self, number: int) -> Iterator[None]:
        """Let the block run to part `number`, or through it where that is the number of parts."""
        last = number == len(self.parts)
        with ExitStack() as stack:
            for index, part in enumerate(self.parts[:number]):
                if part.around is not None:
                    forward = self._computed(index, part, fresh=index == number - 1, last=last)
                    stack.enter_context(_forward_of(self.block.get_submodule(part.around), forward))
            for name in self.passed[number]:
                stack.enter_context(_forward_of(self.block.get_submodule(name), _first_argument))
            yield

    def _computed(self, index: int, part: Part, fresh: bool, last: bool) -> Callable[..., Any]:
        """A forward that returns the output of part `index`: computed from its layer's input when that is `fresh`."""
        compute = self.block.get_submodule(part.names[0]).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            name = f"{index}-{self.key}"
            state = self.stash.take(name) if fresh or last else self.stash.get(name)
            if fresh:
                state = compute(state)
                if not last:
                    self.stash.put(name, state)
            return state if part.rest is None else (state, *part.rest)

        return forward


def plan_parts(
    block: nn.Module, layers: Mapping[str, nn.Module], call: BlockCall, hidden: torch.Tensor
) -> Parts | None:
    """The parts into which `layers` (by name in the block) divide it; None where it cannot be run so.

    call and hidden: how the block is called for a sequence to try it on.
    """
    trace = _Trace(block, call, hidden)
    parts = _groups(trace, layers, hidden)
    if parts is None:
        return None
    plan = Parts(block, parts, [_passed(trace, parts[:number], layers) for number in range(len(parts) + 1)])
    computed: dict[str, int] = {}
    with ExitStack() as stack:
        for name, module in block.named_modules():
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                stack.enter_context(_counting(module, name, computed))
        try:
            output = _try(plan, call, hidden)
        except RunError:
            return None
    once = all(count == 1 for count in computed.values())
    return plan if once and torch.equal(output, trace.output) else None


def _try(plan: Parts, call: BlockCall, hidden: torch.Tensor) -> torch.Tensor:
    for number in range(len(plan.parts)):
        with plan.entered(number):
            plan.run_to(number, 0, call, hidden)
    with plan.entered(len(plan.parts)):
        return plan.run_through(0, call, hidden)


def _first_argument(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


class _Trace:
    """One plain run of a block: what each module was given and what it returned, by name, in the order of the calls."""

    def __init__(self, block: nn.Module, call: BlockCall, hidden: torch.Tensor) -> None:
        self.inputs: dict[str, list[tuple[Any, ...]]] = {}
        self.outputs: dict[str, Any] = {}
        with ExitStack() as stack:
            for name, module in block.named_modules():
                if name:
                    stack.enter_context(self._watched(name, module))
            self.output = call.run(block, hidden)

    @contextmanager
    def _watched(self, name: str, module: nn.Module) -> Iterator[None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs.setdefault(name, []).append((*args, *kwargs.values()))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.outputs[name] = output

        handles = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def once(self, name: str) -> bool:
        """Whether the module was called exactly once."""
        return len(self.inputs.get(name, ())) == 1

    def readers(self, tensor: torch.Tensor) -> list[str]:
        """Modules that were given that very tensor."""
        return [name for name, calls in self.inputs.items() if any(v is tensor for given in calls for v in given)]


def _groups(trace: _Trace, layers: Mapping[str, nn.Module], hidden: torch.Tensor) -> list[Part] | None:
    """Layers with the same input, in the order of their calls; None where one is not called once, with all tokens."""
    groups: dict[int, list[str]] = {}
    for name in trace.inputs:
        if name in layers:
            given = trace.inputs[name][0][0]
            if not trace.once(name) or given.shape[:-1] != hidden.shape[:-1]:
                return None
            groups.setdefault(id(given), []).append(name)
    if sum(map(len, groups.values())) != len(layers):
        return None
    parts = [_part(trace, names) for names in groups.values()]
    for number, (part, following) in enumerate(pairwise(parts)):
        if part.around == part.names[0] and part.names[0].startswith(f"{following.around}."):
            parts[number] = Part(part.names)  # computes on the way to the next part and never again: nothing is kept
    return parts


def _part(trace: _Trace, names: list[str]) -> Part:
    if len(names) > 1:
        return Part(tuple(names))
    path = names[0].split(".")
    for depth in range(1, len(path) + 1):
        around = ".".join(path[:depth])
        output, rest = trace.outputs.get(around), None
        if isinstance(output, tuple):
            output, rest = output[0], tuple(output[1:])
        plain = rest is None or not any(isinstance(value, torch.Tensor) for value in rest)
        if trace.once(around) and output is trace.outputs[names[0]] and plain:
            return Part(tuple(names), around, rest)
    raise AssertionError("a layer returns its own output")


def _passed(trace: _Trace, done: list[Part], layers: Mapping[str, nn.Module]) -> list[str]:
    """Modules without layers, given and returning one tensor, whose result only what is kept of `done` would read."""
    kept = [part.around for part in done if part.around is not None]

    def inside(name: str) -> bool:
        return any(name == module or name.startswith(f"{module}.") for module in kept)

    passed = []
    for name, output in trace.outputs.items():
        given = trace.inputs[name][0]
        leaf = name not in layers and not any(other.startswith(f"{name}.") for other in trace.inputs)
        if not leaf or inside(name) or not trace.once(name) or len(given) != 1:
            continue
        if all(isinstance(value, torch.Tensor) for value in (given[0], output)) and given[0].shape == output.shape:
            readers = trace.readers(output)
            if given[0].dtype == output.dtype and readers and all(map(inside, readers)):
                passed.append(name)
    return passed


@contextmanager
def dense(block: nn.Module, names: tuple[str, ...] | None = None) -> Iterator[None]:
    """Let packed layers (all, or those named) compute with their weights unpacked once, not at every call."""
    chosen = [block.get_submodule(name) for name in names] if names is not None else list(block.modules())
    packed = [module for module in chosen if isinstance(module, PackedLinear) and module.kernel is None]
    for layer in packed:
        layer.kernel = _Dense(layer)
    try:
        yield
    finally:
        for layer in packed:
            del layer.kernel


class _Dense:
    """A packed layer's product, bit for bit that of its own forward."""

    def __init__(self, layer: PackedLinear) -> None:
        self.weight, self.bias = layer.dequantize(), layer.bias

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward for the duration."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def _counting(module: nn.Module, name: str, counts: dict[str, int]) -> Iterator[None]:
    """Count how often the module's own forward computes."""
    compute = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return compute(*args, **kwargs)

    with _forward_of(module, forward):
        yield
