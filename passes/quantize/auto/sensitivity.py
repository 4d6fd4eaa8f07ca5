"""How much the model's output depends on each layer's: one pass forward and one back, a decoder block at a time.

To second order a change dy of a layer's outputs moves the model's distribution p by a KL divergence of
`1/2 E[(g^T dy)^2]`, where g is the gradient of the logits times a random vector whose covariance is the Fisher matrix
`diag(p) - p p^T` of the logits (Martens 2014, arXiv:1412.1193, section 6; the labels of a text have no part in it).
With dy = E x for a change E of the weight, tokens taken as independent and `g_n^2` of output n over tokens in
proportion to `|g|^2` of the layer, that is `sum_n g_n (E S E^T)_nn` a token, with

    S = sum |g|^2 x x^T / sum |g|^2     float32 [K, K]: inputs count where the output depends on them
    g_n = sum g_n^2 / (2 T)             float32 [N], over T tokens

The forward pass keeps every block's inputs, in files where the model is lazy. The backward pass runs each block again
on them, last block first, with gradients: in memory are one block and one sequence's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....optimizer.errors import RunError
from ....optimizer.model import LoadedModel
from ....runtime.decoder_blocks import CapturedBatch, capture, find_blocks, logits_after
from ....runtime.embedding_rows import loaded_around
from ....runtime.lazy import outside_blocks
from ....runtime.tensor_files import Spec, locate, read_stored, write_tensors
from ..hessian import Hessian
from .estimate import Inputs

ROWS = 64
"""Positions whose float32 probabilities are in memory at a time."""


@dataclass
class SharedInput:
    """Layers that read the same inputs. outputs: g above by layer, in nats a token."""

    inputs: Inputs
    outputs: dict[str, torch.Tensor]


Visit = Callable[[list[SharedInput]], None]
"""Is given the layers of a block, or those outside the blocks, while their weights are in memory."""


def measure(
    model: LoadedModel,
    layers: Sequence[str],
    batches: Sequence[torch.Tensor],
    seed: int,
    folder: Path | None,
    visit: Visit,
    progress: Callable[[int, int], None],
) -> list[torch.Tensor]:
    """Give `visit` the sensitivities of the named layers, and return the last block's outputs, [B, L, H] a batch.

    batches: token ids, int64 [B, L]. folder: empty, for the blocks' inputs; None keeps them in memory. progress: is
    told of steps done and of all. Layers that no gradient reaches are not given to `visit`.
    Raises RunError where a gradient is not finite, or cannot be had.
    """
    with torch.no_grad():
        return _Passes(model, layers, batches, _Store(folder)).run(seed, visit, progress)


class _Passes:
    """The two passes over a model."""

    def __init__(
        self, model: LoadedModel, layers: Sequence[str], batches: Sequence[torch.Tensor], store: _Store
    ) -> None:
        self.model, self.module, self.batches, self.store = model, model.module, batches, store
        self.name, self.blocks = find_blocks(model.module)
        self.layers = {name: model.module.get_submodule(name) for name in layers}
        self.tokens = sum(ids.numel() for ids in batches)
        self.around = outside_blocks(model.module, self.name)

    def run(self, seed: int, visit: Visit, progress: Callable[[int, int], None]) -> list[torch.Tensor]:
        total = 2 * len(self.blocks) + 1
        captured = self._forward(lambda step: progress(step, total))
        last = [batch.hidden for batch in captured]
        with loaded_around(self.model, *self.around):
            outside = {name: m for name, m in self.layers.items() if not name.startswith(f"{self.name}.")}
            upstream = self._last(captured, outside, seed, visit)
        progress(len(self.blocks) + 1, total)
        for index in reversed(range(len(self.blocks))):
            name = f"{self.name}.{index}"
            with self.model.loaded(name):
                inside = {key: m for key, m in self.layers.items() if key.startswith(f"{name}.")}
                upstream = self._block(index, captured, inside, upstream, visit)
            progress(total - index, total)
        return last

    def _forward(self, progress: Callable[[int], None]) -> list[CapturedBatch]:
        """Run all blocks, keeping what each is given; the batches' states are then those after the last block."""
        head = self.module.get_output_embeddings()  # type: ignore[operator]
        around = [name for name in self.around if self.module.get_submodule(name) is not head]
        captured: list[CapturedBatch] = []
        with loaded_around(self.model, *around, f"{self.name}.0"):
            for ids in self.batches:
                captured += capture(self.module, self.blocks, [ids])
                captured[-1].share_arguments(captured[0])
        for index, block in enumerate(self.blocks):
            with self.model.loaded(f"{self.name}.{index}"):
                for number, batch in enumerate(captured):
                    self.store.put(index, number, batch.hidden)
                    batch.hidden = batch.calls[index].run(block, batch.hidden)
            progress(index + 1)
        return captured

    def _last(
        self, captured: list[CapturedBatch], outside: Mapping[str, nn.Module], seed: int, visit: Visit
    ) -> list[torch.Tensor]:
        """From the logits back to the last block's outputs; returns the gradients there."""
        upstream, watch = [], _Watch(outside, self.tokens)
        generator = torch.Generator(captured[0].device).manual_seed(seed)
        with watch.hooks():
            for ids, batch in zip(self.batches, captured):
                hidden = batch.hidden
                leaf = hidden.detach().clone().requires_grad_()
                batch.hidden = leaf
                with torch.enable_grad():
                    logits = logits_after(self.module, self.blocks, ids, batch)
                batch.hidden = hidden
                upstream.append(_gradient(logits, leaf, fisher_vector(logits.detach(), generator), "the head"))
                watch.flush()
        visit(watch.results())
        return upstream

    def _block(
        self,
        index: int,
        captured: list[CapturedBatch],
        inside: Mapping[str, nn.Module],
        upstream: list[torch.Tensor],
        visit: Visit,
    ) -> list[torch.Tensor]:
        """From a block's outputs back to its inputs; returns the gradients there."""
        block, watch, gradients = self.blocks[index], _Watch(inside, self.tokens), []
        with watch.hooks():
            for number, (batch, above) in enumerate(zip(captured, upstream)):
                leaf = self.store.take(index, number).to(batch.device).requires_grad_()
                with torch.enable_grad():
                    output = batch.calls[index].run(block, leaf)
                gradients.append(_gradient(output, leaf, above, f"{self.name}.{index}"))
                watch.flush()
        visit(watch.results())
        return gradients


def _gradient(output: torch.Tensor, leaf: torch.Tensor, above: torch.Tensor, where: str) -> torch.Tensor:
    try:
        (gradient,) = torch.autograd.grad(output, [leaf], above.to(output.dtype))
    except RuntimeError as error:
        raise RunError(
            f"no gradient can be had ({str(error).splitlines()[0]})", where, "Take another method than `auto`."
        ) from None
    if not bool(torch.isfinite(gradient).all()):
        raise RunError("a gradient is NaN or infinite", where, "Load the model in bfloat16 or float32.")
    return gradient


def fisher_vector(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random vector for each position with mean 0 and covariance `diag(p) - p p^T`, p = softmax(logits) [..., vocab].

    `sqrt(p) e - p (sqrt(p)^T e)` with random signs e. Returns the dtype of the logits.
    """
    rows, out = logits.reshape(-1, logits.shape[-1]), torch.empty_like(logits)
    for own, result in zip(rows.split(ROWS), out.view(rows.shape).split(ROWS)):
        p = torch.softmax(own.float(), dim=-1)
        signs = torch.empty_like(p).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        vector = p.sqrt().mul_(signs)
        result.copy_(vector - p * vector.sum(-1, keepdim=True))
    return out


@dataclass
class _Sums:
    """Sums over the tokens that reached layers with one input: x x^T, |g|^2 x x^T, |g|^2, and g^2 by layer."""

    hessian: Hessian
    weighted: Hessian
    weight: float = 0.0
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, inputs: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> None:
        """inputs: [..., K]; gradients: [..., N] by layer, over the same tokens."""
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        weight = torch.zeros(len(rows), device=rows.device)
        for name, gradient in gradients.items():
            squares = gradient.reshape(len(rows), -1).float().square()
            weight += squares.sum(1)
            self.squares[name] = self.squares.get(name, 0.0) + squares.sum(0)
        self.weight += float(weight.sum())
        self.hessian.add(rows)
        self.weighted.add(rows * weight.sqrt()[:, None])


class _Watch:
    """Hooks that gather the sums of named layers, forward and back. Call `flush` after each backward pass."""

    def __init__(self, layers: Mapping[str, nn.Module], tokens: int) -> None:
        self.layers, self.tokens = layers, tokens
        self._inputs: dict[str, list[torch.Tensor]] = {}
        self._gradients: dict[tuple[str, int], torch.Tensor] = {}
        self._sums: dict[tuple[str, ...], _Sums] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Attach the hooks for the duration."""
        handles = [m.register_forward_hook(partial(self._seen, name)) for name, m in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _seen(self, name: str, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        calls = self._inputs.setdefault(name, [])
        key = (name, len(calls))
        calls.append(args[0])
        if output.requires_grad:
            output.register_hook(lambda gradient: self._gradients.__setitem__(key, gradient))

    def flush(self) -> None:
        """Add what the last pass showed; layers that were given the very same tensors share their sums."""
        shared: dict[tuple[int, ...], list[str]] = {}
        for name, calls in self._inputs.items():
            shared.setdefault(tuple(id(x) for x in calls), []).append(name)
        for names in shared.values():
            calls = self._inputs[names[0]]
            for number, inputs in enumerate(calls):
                keys = {name: (name, number) for name in names}
                found = {name: self._gradients[key] for name, key in keys.items() if key in self._gradients}
                if found:
                    self._sums_of(tuple(names), inputs).add(inputs.detach(), found)
        self._inputs.clear()
        self._gradients.clear()

    def _sums_of(self, names: tuple[str, ...], inputs: torch.Tensor) -> _Sums:
        if names not in self._sums:
            columns = inputs.shape[-1]
            self._sums[names] = _Sums(Hessian(columns, inputs.device), Hessian(columns, inputs.device))
        return self._sums[names]

    def results(self) -> list[SharedInput]:
        """What was gathered. A layer that changed its companions stays with the first ones."""
        found: list[SharedInput] = []
        seen: set[str] = set()
        for sums in self._sums.values():
            own = {n: square / (2 * self.tokens) for n, square in sums.squares.items() if n not in seen}
            seen.update(own)
            if own:
                total = sums.weighted.take_mean().mul_(sums.weighted.rows)
                metric = total.div_(max(sums.weight, torch.finfo(torch.float32).tiny))
                found.append(SharedInput(Inputs(sums.hessian.take_mean(), metric), own))
        self._sums.clear()
        return found


class _Store:
    """The blocks' inputs by block and batch: in memory, or in files of a folder; each is taken once."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._kept: dict[tuple[int, int], torch.Tensor | Path] = {}

    def put(self, block: int, number: int, state: torch.Tensor) -> None:
        if self.folder is None:
            self._kept[block, number] = state
            return
        path = self.folder / f"{block:04d}-{number:05d}.safetensors"
        write_tensors(path, {"hidden": Spec.of(state)}, lambda name: state)
        self._kept[block, number] = path

    def take(self, block: int, number: int) -> torch.Tensor:
        kept = self._kept.pop((block, number))
        if isinstance(kept, torch.Tensor):
            return kept.detach().clone()
        state = read_stored(locate([kept])["hidden"])
        kept.unlink()
        return state
