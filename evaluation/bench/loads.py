"""The loads of the command's modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .arrivals import arrival_times
from .lengths import Lengths
from .metrics import Objectives
from .prompts import RandomPrompts, Request, read_requests
from .run import Load
from .session import Case

MODES = ("latency", "throughput", "serve", "sweep")


@dataclass(frozen=True)
class LoadSettings:
    """What to send. A mode ignores the fields that it does not have: rates are `serve`'s, batches `sweep`'s."""

    input_len: Lengths = field(default_factory=lambda: Lengths(128, 128))
    output_len: Lengths = field(default_factory=lambda: Lengths(64, 64))
    num_prompts: int | None = 32
    """Requests a round; None: as many as the file has."""
    prefix_len: int = 0
    num_prefixes: int = 1
    prompts: Path | None = None
    """JSONL file in the place of random prompts; a round takes the next `num_prompts`, then from the start again."""
    seed: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    batches: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (128, 1024)
    objectives: Objectives = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        plain = {
            name: value for name, value in self.__dict__.items() if not isinstance(value, float) or math.isfinite(value)
        }
        infinite = {name: "inf" for name in self.__dict__ if name not in plain}
        shown = {"input_len": str(self.input_len), "output_len": str(self.output_len)}
        return {**plain, **infinite, **shown, "prompts": None if self.prompts is None else self.prompts.name}


def cases_of(mode: str, settings: LoadSettings, prompts: RandomPrompts | None) -> list[Case]:
    """The cases of a mode. prompts: None where a file names them. Raises UsageError for a rate that makes no sense."""
    if mode == "sweep":
        assert prompts is not None
        return [_cell(settings, prompts, batch, context) for context in settings.contexts for batch in settings.batches]
    make = _requests(settings, prompts)
    rate = settings.request_rate if mode == "serve" else math.inf
    limit = {"latency": 1, "throughput": None}.get(mode, settings.max_concurrency)
    arrival_times(1, rate, settings.burstiness)  # so that a wrong rate shows before a model is loaded

    def load(number: int) -> Load:
        requests = make(number)
        arrivals = arrival_times(len(requests), rate, settings.burstiness, seed=settings.seed * 1_000_003 + number + 1)
        return Load(requests, arrivals, limit)

    return [Case({}, load)]


def _requests(settings: LoadSettings, prompts: RandomPrompts | None) -> Callable[[int], list[Request]]:
    if prompts is None:
        assert settings.prompts is not None
        listed = read_requests(settings.prompts, settings.output_len, settings.seed)
        count = settings.num_prompts or len(listed)
        return lambda number: [listed[(number * count + i) % len(listed)] for i in range(count)]

    def make(number: int) -> list[Request]:
        return prompts.make(
            settings.num_prompts or 1,
            settings.input_len,
            settings.output_len,
            round_number=number,
            prefix_len=settings.prefix_len,
            num_prefixes=settings.num_prefixes,
        )

    return make


def _cell(settings: LoadSettings, prompts: RandomPrompts, batch: int, context: int) -> Case:
    def load(number: int) -> Load:
        length = Lengths(context, context)
        requests = prompts.make(
            batch, length, settings.output_len, round_number=number * 1_000_003 + context * 1009 + batch
        )
        return Load(requests, [0.0] * batch, batch)

    return Case({"batch": batch, "context": context}, load)
