"""What a kind of draft is worth on a model: plain decoding and drafts in turn, prompt by prompt, on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.base import Context
from ..optimizer.runtime_spec import DraftSpec

if TYPE_CHECKING:
    from ..optimizer.model import LoadedModel
    from ..runtime.engine.engine import Engine

PROMPT_TOKENS = 96
"""Most tokens of a prompt that is taken from the calibration data."""


@dataclass
class Measured:
    """One kind on all prompts. speedup: geometric mean over the prompts of plain seconds / seconds with drafts; error:
    its standard error. tokens_per_step: new tokens a step of the target gave (1 without drafts)."""

    spec: DraftSpec
    speedup: float
    error: float
    acceptance: float
    tokens_per_step: float
    drafted: int
    accepted: int
    accepted_by_position: list[int]
    drafted_by_position: list[int]
    plain_tokens_per_second: float
    tokens_per_second: float
    same_text: int
    """Prompts on which both gave the same tokens."""
    prompts: int
    more: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the report: rounded figures."""
        positions = [round(a / d, 3) for a, d in zip(self.accepted_by_position, self.drafted_by_position) if d]
        return {
            "kind": self.spec.kind,
            "speedup": round(self.speedup, 3),
            "standard_error": round(self.error, 3),
            "acceptance_rate": round(self.acceptance, 4),
            "acceptance_by_position": positions,
            "tokens_per_step": round(self.tokens_per_step, 3),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "plain_tokens_per_second": round(self.plain_tokens_per_second, 2),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "same_text": f"{self.same_text} of {self.prompts}",
            **self.more,
        }

    def __str__(self) -> str:
        forced = next((f for name, f in self.more.items() if name.endswith("_forced")), None)
        if forced is not None:
            return (
                f"{self.spec.kind}: {forced['speedup']} times plain decoding where drafts are forced, of which "
                f"{forced['acceptance_rate']:.0%} are accepted"
            )
        return (
            f"{self.spec.kind}: {self.speedup:.2f} (± {self.error:.2f}) times plain decoding, {self.acceptance:.0%} of "
            f"{self.drafted} drafts accepted, {self.tokens_per_step:.2f} tokens a step"
        )


@contextmanager
def target_runner(model: LoadedModel, num_blocks: int = 64) -> Iterator[Any]:
    """A runner over the model as it is, on as many blocks as the measurement needs."""
    from ..runtime.engine.runner_select import build_runner, options_of
    from ..runtime.linear_settings import linear_options

    known = options_of("auto")
    options = {k: v for k, v in linear_options(model.runtime.linear, {}).items() if k in known}
    runner = build_runner(model.module, "auto", num_blocks=num_blocks, max_num_seqs=16, **options)
    try:
        yield runner
    finally:
        runner.close()


def take_prompts(model: LoadedModel, context: Context, texts: Sequence[str] | None, count: int) -> list[list[int]]:
    """Token ids of the texts given, else beginnings of `count` calibration sequences spread over all."""
    if texts:
        return [list(model.tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    batches = context.calibration.batches()
    taken = [batches[i * len(batches) // count] for i in range(min(count, len(batches)))]
    return [batch[0, :PROMPT_TOKENS].tolist() for batch in taken]


def measure(
    runner: Any,
    specs: Sequence[DraftSpec],
    folder: Path | None,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    context: Context,
) -> list[Measured]:
    """Each spec on each prompt, greedy, one request at a time; plain decoding once a prompt and spec, right beside it.

    folder: of the draft model, where a spec asks for one. Raises what the runner and the draft's runner raise.
    """
    from ..runtime.draft_setup import make_speculator
    from ..runtime.engine.engine import Engine
    from ..runtime.engine.scheduler_config import SchedulerConfig

    config = SchedulerConfig(max_num_seqs=8, prefix_caching=False)
    plain, found = Engine(runner, scheduler=config), []
    for number, spec in enumerate(specs, start=1):
        speculator = make_speculator(spec, runner, config, folder)
        if speculator is None:
            continue
        engine = Engine(runner, scheduler=config, drafter=speculator)
        try:
            found.append(_one(spec, plain, engine, prompts, new_tokens))
        finally:
            speculator.close()
        context.progress(number, len(specs), str(found[-1]))
    return found


def _one(spec: DraftSpec, plain: Engine, engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Measured:
    generate(plain, prompts[0], 4)
    generate(engine, prompts[0], 4)
    before = engine.metrics()
    seconds: list[tuple[float, float]] = []
    same = tokens = 0
    for number, prompt in enumerate(prompts):
        both = {}
        for which in (plain, engine) if number % 2 == 0 else (engine, plain):
            both[id(which)] = generate(which, prompt, new_tokens)
        (expected, slow), (got, fast) = both[id(plain)], both[id(engine)]
        seconds.append((slow, fast))
        same += expected == got
        tokens += len(got)
    after = engine.metrics()
    logs = [math.log(slow / fast) for slow, fast in seconds]
    drafted = after.spec_decode_num_draft_tokens_total - before.spec_decode_num_draft_tokens_total
    accepted = after.spec_decode_num_accepted_tokens_total - before.spec_decode_num_accepted_tokens_total
    return Measured(
        spec=spec,
        speedup=math.exp(statistics.fmean(logs)),
        error=statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0,
        acceptance=accepted / drafted if drafted else 0.0,
        tokens_per_step=tokens / max(1, after.steps_total - before.steps_total),
        drafted=drafted,
        accepted=accepted,
        accepted_by_position=after.spec_decode_num_accepted_tokens_per_pos_total,
        drafted_by_position=after.spec_decode_num_draft_tokens_per_pos_total,
        plain_tokens_per_second=tokens / sum(slow for slow, _ in seconds),
        tokens_per_second=tokens / sum(fast for _, fast in seconds),
        same_text=same,
        prompts=len(prompts),
    )


def generate(engine: Engine, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    """The greedy continuation and the seconds it took. Raises the request's error."""
    from ..runtime.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    tokens: list[int] = []
    started = time.perf_counter()
    engine.add_request(prompt, params)
    while engine.has_work:
        for output in engine.step():
            tokens += output.new_token_ids
            if output.error is not None:
                raise output.error
    return tokens, time.perf_counter() - started
