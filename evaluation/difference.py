"""Two models of one architecture, layer by layer, in one walk over their decoder blocks.

One block of each is in memory at a time (where the files allow it), packed layers stay packed, and of those only one is
dequantized at a time. A unit is a decoder block, or what lies before or behind the blocks. Its harm is the mean
KL(a || a with only this unit taken from b): the variant enters the walk at that unit, and goes through the rest of a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..optimizer.events import Event, Listener, silent
from .divergence import DivergenceMeter, kl_rows
from .flips import FlipMeter
from .layers import ErrorSum, describe, holders, recorded, weight_error
from .progress import stage
from .scoring import TextMeter
from .slices import first_states, places, slice_rows
from .windows import TextWindows, Window

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..optimizer.model import LoadedModel
    from ..runtime.decoder_blocks import CapturedBatch
    from ..runtime.tensor_files import Stored

BEFORE, BEHIND = "embeddings", "final norm and head"
"""Names of the units outside the blocks."""


@dataclass
class Side:
    """One of the two models, and where its tensors lie."""

    model: LoadedModel
    stored: dict[str, Stored]


@dataclass
class Unit:
    """What is known of a unit. `modules`: records of its modules; errors are of b from a."""

    name: str
    kind: str
    modules: list[dict[str, Any]] = field(default_factory=list)
    weights: ErrorSum = field(default_factory=ErrorSum)
    output: ErrorSum = field(default_factory=ErrorSum)
    local: ErrorSum = field(default_factory=ErrorSum)
    harm: float = 0.0
    differs: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "harm": self.harm,
            "weight_error": self.weights.relative,
            "max_weight_error": self.weights.largest,
            "output_error": self.output.relative,
            "local_error": self.local.relative,
            "bytes_a": sum(module["a"]["bytes"] for module in self.modules),
            "bytes_b": sum(module["b"]["bytes"] for module in self.modules),
            "modules": self.modules,
        }


@dataclass
class Difference:
    """Units in the order of the model; the two models' scores of the text and their divergence; flips."""

    units: list[Unit]
    scores: tuple[dict[str, Any], dict[str, Any]]
    divergence: dict[str, Any]
    flips: FlipMeter


def walk(
    a: Side,
    b: Side,
    text: TextWindows,
    *,
    harm_tokens: int = 128,
    most_flips: int = 100,
    listener: Listener = silent,
) -> Difference:
    """Compare two models on a text's windows; harm is measured on the first window's first `harm_tokens` tokens.

    The models have the same modules and vocabulary. Raises RunError where a model cannot run block by block.
    """
    from ..runtime.decoder_blocks import find_blocks

    ids = [window.ids[None] for window in text.windows]
    ids.append(ids[0][:, :harm_tokens])
    walker = _Walk(a, b, first_states(a.model, ids), first_states(b.model, ids))
    name, blocks = find_blocks(a.model.module)
    _, others = find_blocks(b.model.module)
    with stage(listener, "layers"):
        walker.before(name)
        for index in range(len(blocks)):
            walker.block(f"{name}.{index}", index, blocks[index], others[index])
            listener(Event("progress", "layers", step=index + 1, total=len(blocks)))
        return walker.behind(name, text, ids, most_flips)


class _Walk:
    """State of a walk: both models' hidden states of every window, the last of them the one that harm is measured on,
    and the variants' states of that one."""

    def __init__(self, a: Side, b: Side, states: list[CapturedBatch], others: list[CapturedBatch]) -> None:
        self.a, self.b, self.states, self.others = a, b, states, others
        self.units: list[Unit] = []
        self.variants: dict[str, torch.Tensor] = {}

    def before(self, blocks_name: str) -> None:
        """What lies before the blocks: embeddings, by the hidden states that it makes."""
        unit = Unit(BEFORE, "outside")
        for one, other in zip(self.states[:-1], self.others[:-1]):
            unit.output.add(one.hidden, other.hidden)
        unit.local.add(self.states[-1].hidden, self.others[-1].hidden)
        names = self._outside(blocks_name, before=True)
        self._modules(unit, {name: self.a.model.module.get_submodule(name) for name in names})
        unit.differs = unit.differs or unit.local.difference > 0
        if unit.differs:
            self.variants[unit.name] = self.others[-1].hidden
        self.units.append(unit)

    def block(self, name: str, index: int, block: nn.Module, other: nn.Module) -> None:
        """One decoder block: its modules' weights, then its outputs."""
        import torch

        from ..runtime.decoder_blocks import evaluation_mode

        unit = Unit(name, "block")
        with (
            self.a.model.loaded(name),
            self.b.model.loaded(name),
            torch.inference_mode(),
            evaluation_mode(block),
            evaluation_mode(other),
        ):
            own = holders(block, name)
            self._modules(unit, own)
            errors = {key: ErrorSum() for key in own}
            theirs = {key: module for key, module in holders(other, name).items() if key in own}
            for mine, that in zip(self.states[:-1], self.others[:-1]):
                with recorded(own) as left, recorded(theirs) as right:
                    mine.hidden = mine.calls[index].run(block, mine.hidden)
                    that.hidden = that.calls[index].run(other, that.hidden)
                unit.output.add(mine.hidden, that.hidden)
                for key in left.keys() & right.keys():
                    if left[key].shape == right[key].shape:
                        errors[key].add(left[key], right[key])
            self._harm_window(unit, index, block, other)
        for record in unit.modules:
            error = errors.get(record["name"])
            record["output_error"] = error.relative if error is not None and error.norm else None
        self.units.append(unit)

    def _harm_window(self, unit: Unit, index: int, block: nn.Module, other: nn.Module) -> None:
        """Take a's state, those of the variants, and the variant that this block of b makes, through the block."""
        mine, that = self.states[-1], self.others[-1]
        call = mine.calls[index]
        before, mine.hidden = mine.hidden, call.run(block, mine.hidden)
        for key, state in self.variants.items():
            self.variants[key] = call.run(block, state)
        if unit.differs:
            self.variants[unit.name] = that.calls[index].run(other, before)
            unit.local.add(mine.hidden, self.variants[unit.name])

    def behind(self, blocks_name: str, text: TextWindows, ids: Sequence[torch.Tensor], most_flips: int) -> Difference:
        """What lies behind the blocks, then the logits of both models and of all variants, slice by slice."""
        import torch

        from ..runtime.decoder_blocks import evaluation_mode
        from ..runtime.embedding_rows import loaded_around
        from ..runtime.lazy import outside_blocks

        a, b = self.a.model, self.b.model
        unit = Unit(BEHIND, "outside")
        names = self._outside(blocks_name, before=False)
        self._modules(unit, {name: a.module.get_submodule(name) for name in names})
        self.units.append(unit)
        rows = slice_rows(a.config.get_text_config().vocab_size)
        scores, divergence = (TextMeter(text), TextMeter(text)), DivergenceMeter()
        flips = FlipMeter(a.tokenizer, most_flips)
        with (
            loaded_around(a, *outside_blocks(a.module, blocks_name)),
            loaded_around(b, *outside_blocks(b.module, blocks_name)),
            torch.inference_mode(),
            evaluation_mode(a.module),
            evaluation_mode(b.module),
        ):
            for number, start, end in places(text.windows, rows):
                part = slice(start - 1, end - 1)
                one = _logits(self.a, ids[number], self.states[number], part)
                other = _logits(self.b, ids[number], self.others[number], part)
                scores[0].update(number, start, end, one)
                scores[1].update(number, start, end, other)
                divergence.update(one, other)
                flips.update(number, text.windows[number].ids, start, one, other)
                unit.output.add(one, other)
            self._harm(ids[-1], rows)
        found = {**divergence.result().as_dict(), "histogram": divergence.histogram()}
        return Difference(self.units, (scores[0].result().as_dict(), scores[1].result().as_dict()), found, flips)

    def _harm(self, ids: torch.Tensor, rows: int) -> None:
        """Mean KL of every variant from a, over the positions of the harm window."""
        last = self.states[-1]
        behind = self.units[-1]
        sums = dict.fromkeys(self.variants, 0.0)
        window = Window(ids[0], 1, 0)
        for _, start, end in places([window], rows):
            part = slice(start - 1, end - 1)
            plain = _logits(self.a, ids, last, part)
            for key, state in self.variants.items():
                sums[key] += kl_rows(plain, _logits(self.a, ids, last, part, state))[0].double().sum().item()
            if behind.differs:
                changed = _logits(self.b, ids, self.others[-1], part, last.hidden)
                behind.harm += kl_rows(plain, changed)[0].double().sum().item() / window.num_scored
                behind.local.add(plain, changed)
        for unit in self.units:
            if unit.name in sums:
                unit.harm = sums[unit.name] / window.num_scored

    def _modules(self, unit: Unit, modules: dict[str, nn.Module]) -> None:
        """Record the modules, each one's weights read and compared alone."""
        import torch

        others = dict(self.b.model.module.named_modules())
        for name, module in modules.items():
            other = others[name]
            with self.a.model.loaded(name), self.b.model.loaded(name), torch.inference_mode():
                error = weight_error(module, other)
                shape = _shape(module)
            if error is not None:
                unit.weights.join(error)
            unit.differs = unit.differs or error is None or error.difference > 0
            unit.modules.append(
                {
                    "name": name,
                    "shape": shape,
                    "a": describe(module, name, self.a.stored),
                    "b": describe(other, name, self.b.stored),
                    "weight_error": None if error is None else error.relative,
                    "max_weight_error": None if error is None else error.largest,
                    "output_error": None,
                }
            )

    def _outside(self, blocks_name: str, before: bool) -> list[str]:
        """Modules with weights outside the blocks: those before them, or those behind, in the order of the model."""
        from ..runtime.lazy import outside_blocks

        names = [name for name in outside_blocks(self.a.model.module, blocks_name) if self._holds(name)]
        head = self.a.model.module.get_output_embeddings()  # type: ignore[operator]
        order = list(dict(self.a.model.module.named_modules()))
        place = order.index(blocks_name)

        def first(name: str) -> bool:
            return order.index(name) < place and self.a.model.module.get_submodule(name) is not head

        return [name for name in names if first(name) == before]

    def _holds(self, name: str) -> bool:
        return any(p is not None for p in self.a.model.module.get_submodule(name)._parameters.values())


def _logits(
    side: Side, ids: torch.Tensor, batch: CapturedBatch, part: slice, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits `[n, vocab]` of the positions `part`, from the batch's hidden state or another after the last block."""
    from ..runtime.decoder_blocks import CapturedBatch, find_blocks, logits_after

    module = side.model.module
    _, blocks = find_blocks(module)
    state = (batch.hidden if hidden is None else hidden)[:, part]
    return logits_after(module, blocks, ids[:, part], CapturedBatch(state, batch.calls, batch.extra))[0]


def _shape(module: nn.Module) -> list[int]:
    """Of a module's weight, as [out, in] for linear layers."""
    rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if isinstance(rows, int) and isinstance(columns, int):
        return [rows, columns]
    found = [list(p.shape) for p in module._parameters.values() if p is not None]
    return max(found, key=len)
