"""Decode and prefill speed of an LLM, whatever backend runs it."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import UsageError

if TYPE_CHECKING:
    from ..runtime.llm import LLM


@dataclass(frozen=True)
class Speed:
    """Tokens a second, medians over `rounds`, with each round's figure.

    decode: new tokens after the first, of one greedy sequence. prefill: prompt tokens over the time to one new token.
    foreign_cpu: share of the machine's CPU time that other processes used meanwhile (None where it cannot be told);
    well above 0 the figures are too low.
    """

    decode: float
    prefill: float
    decode_rounds: tuple[float, ...]
    prefill_rounds: tuple[float, ...]
    prompt_tokens: int
    new_tokens: int
    prefill_tokens: int
    foreign_cpu: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_speed(
    llm: LLM,
    *,
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    prefill_tokens: int = 512,
    rounds: int = 3,
    seed: int = 0,
) -> Speed:
    """Time an LLM: one round to warm up, then `rounds`.

    Prompts are random tokens, other ones each time, so that a prefix cache cannot answer; end of text is ignored. The
    time of a first token is subtracted from the decode figure. `prefill_tokens` shrinks to what the context holds.
    Raises UsageError where the context has no room for the decode prompt.
    """
    import random

    limit = llm.context_length or 2**31
    if prompt_tokens + new_tokens + 1 > limit:
        raise UsageError(
            f"{prompt_tokens} prompt and {new_tokens} new tokens do not fit the context of {limit}",
            "measure_speed",
            "Ask for fewer new tokens.",
        )
    prefill_tokens = min(prefill_tokens, limit - 1)
    generator = random.Random(seed)
    special = set(llm.tokenizer.all_special_ids)
    plain = [i for i in range(min(len(llm.tokenizer), llm.vocab_size)) if i not in special]

    def timed(length: int, count: int) -> float:
        ids = [generator.choice(plain) for _ in range(length)]
        start = time.perf_counter()
        llm.generate(ids, max_new_tokens=count, ignore_eos=True)
        return time.perf_counter() - start

    decode, prefill = [], []
    before = None
    for number in range(rounds + 1):
        first = timed(prompt_tokens, 1)
        whole = timed(prompt_tokens, 1 + new_tokens)
        long = timed(prefill_tokens, 1)
        if number == 0:
            before = _cpu_seconds()
            continue
        decode.append(new_tokens / max(whole - first, 1e-9))
        prefill.append(prefill_tokens / long)
    return Speed(
        decode=statistics.median(decode),
        prefill=statistics.median(prefill),
        decode_rounds=tuple(decode),
        prefill_rounds=tuple(prefill),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill_tokens=prefill_tokens,
        foreign_cpu=_foreign_share(before, _cpu_seconds()),
    )


def _cpu_seconds() -> tuple[float, float, float]:
    """(CPU seconds the machine was busy, CPU seconds of this process, CPU seconds that passed in all)."""
    import psutil

    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    total = sum(value for name, value in times._asdict().items() if name not in ("guest", "guest_nice"))
    own = psutil.Process().cpu_times()
    return total - idle, own.user + own.system, total


def _foreign_share(before: tuple[float, float, float] | None, after: tuple[float, float, float]) -> float | None:
    if before is None or after[2] <= before[2]:
        return None
    busy, own, total = (b - a for a, b in zip(before, after))
    return round(min(max((busy - own) / total, 0.0), 1.0), 3)
