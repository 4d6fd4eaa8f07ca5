"""The techniques of inference on the same prompts, a row each: which model, how it is run, what it is compared with."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import LlmoptError, RunError
from ...optimizer.events import Event, Listener, silent
from .artifact_process import ArtifactProcess
from .lengths import Lengths
from .machine import Meter
from .metrics import run_metrics
from .prompts import Request
from .run import Load, Result
from .session import errors, spread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCE = "source"
BASELINE = "recompute"


@dataclass(frozen=True)
class Technique:
    """One row. `model`: the source, or the recipe that makes the artifact. `against`: the row that isolates its effect.

    at_once: all requests are given at once; else one after another. absent: why it cannot be measured here.
    """

    key: str
    title: str
    against: str | None
    options: dict[str, Any] = field(default_factory=dict)
    model: str = SOURCE
    at_once: bool = False
    absent: str = ""


def techniques(batch: int, flash: str, no_flash: str = "") -> list[Technique]:
    """The rows, in the order in which each may refer to an earlier one.

    batch: most sequences of a batch. flash: transformers' name of the attention that tiles (flash_attn or sdpa);
    no_flash: why there is none.
    """
    native: dict[str, Any] = {"engine": "native", "draft": False}
    several = {**native, "max_num_seqs": batch}
    plain = {"engine": "static", "draft": False}
    return [
        Technique(BASELINE, "no cache: every step runs the whole sequence", None,
                  {"engine": "recompute", "attention": "eager"}),
        Technique("kv-cache", "KV cache", BASELINE, {**plain, "attention": "eager"}),
        Technique("flash-attention", f"flash attention ({flash})", "kv-cache", {**plain, "attention": flash},
                  absent=no_flash),
        Technique("engine", "paged KV cache and fused kernels (the engine)", "kv-cache", native),
        Technique("int8", "8-bit weights (recipe int8)", "engine", native, "int8"),
        Technique("int4", "4-bit weights (recipe int4-flash)", "engine", native, "int4-flash"),
        Technique("speculative", "speculative decoding (n-grams)", "engine", {**native, "draft": {"kind": "ngram"}}),
        Technique("dynamic-batching", f"dynamic batching, {batch} at once", "engine", {**several, "mode": "dynamic"},
                  at_once=True),
        Technique("continuous-batching", f"continuous batching, {batch} at once", "dynamic-batching", several,
                  at_once=True),
        Technique("together", f"4-bit weights, continuous batching, {batch} at once", BASELINE, several, "int4-flash",
                  at_once=True),
    ]  # fmt: skip


def flash_backend(device: str) -> tuple[str, str]:
    """The attention that tiles, as transformers has it here, and why there is none (empty where there is one).

    On CUDA that is the package flash-attn; on the CPU torch's scaled_dot_product_attention, whose CPU kernel is
    FlashAttention's algorithm.
    """
    import torch

    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if not on_gpu:
        return "sdpa", ""
    from importlib.util import find_spec

    if find_spec("flash_attn") is None:
        return "flash_attn", "the package flash-attn is not installed"
    if torch.cuda.get_device_capability() < (8, 0):
        return "flash_attn", "flash-attn needs compute capability 8.0"
    return "flash_attn", ""


def text_requests(
    tokenizer: PreTrainedTokenizerBase, text: str, count: int, input_len: Lengths, output_len: Lengths, seed: int
) -> list[Request]:
    """Requests whose prompts are passages of a text, as token ids. Raises RunError where the text is too short."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    head = [i for i in tokenizer.encode("") if i in tokenizer.all_special_ids]  # BOS, where the tokenizer puts one
    generator = random.Random(seed)
    if len(ids) <= input_len.high:
        raise RunError(f"the text has {len(ids)} tokens, too few for prompts of {input_len.high}", "prompts")
    found = []
    for _ in range(count):
        length = max(1, input_len.draw(generator) - len(head))
        start = generator.randrange(len(ids) - length)
        found.append(Request(head + ids[start : start + length], output_len.draw(generator)))
    return found


def windows(tokenizer: PreTrainedTokenizerBase, text: str, count: int, length: int) -> list[list[int]]:
    """Consecutive windows of a text's tokens, to score."""
    head = [i for i in tokenizer.encode("") if i in tokenizer.all_special_ids]
    ids = tokenizer.encode(text, add_special_tokens=False)
    size = length - len(head)
    found = [head + ids[i : i + size] for i in range(0, min(len(ids), count * size), size)]
    return [one for one in found if len(one) > 1]


@dataclass
class Job:
    """What every row gets: the requests, the texts to score, how a model is opened."""

    requests: list[Request]
    warmup: list[Request]
    scored: list[list[int]]
    options: dict[str, Any]
    """Keywords of `llmopt.load` for every row."""
    threads: int | None = None


def run_row(row: Technique, folder: Path, job: Job, first: bool) -> dict[str, Any]:
    """One row in a process of its own: `result`, `about`, `foreign_cpu`, `energy`; `perplexity` in the first round.

    Raises what loading and running raise.
    """
    options = {**job.options, **row.options}
    if job.threads is not None:
        options["num_threads"] = job.threads
    with ArtifactProcess(folder, name=row.key, options=options, keep=True) as target:
        limit = None if row.at_once else 1
        target.run(Load(job.warmup, [0.0] * len(job.warmup), limit))
        meter = Meter(target.pids()).start()
        result = target.run(Load(job.requests, [0.0] * len(job.requests), limit))
        found = {"result": result, "about": target.about(), **meter.read()}
        if any(not record.completed for record in result.records):
            raise RunError(f"requests failed: {next(iter(errors(result.records)))}", row.key)
        if first:
            scored = target.score(job.scored)
            found["perplexity"], found["scored_tokens"] = math.exp(scored["nll"]), scored["num_tokens"]
        return found


def measure(
    rows: Sequence[Technique],
    folders: Callable[[str], Path],
    job: Job,
    rounds: int = 2,
    listener: Listener = silent,
) -> list[dict[str, Any]]:
    """All rows, `rounds` times over; each time a row has a process of its own, so that its memory is its own.

    folders: from a row's `model` to the folder; what it raises, like what running a row raises, makes the row one
    that was not measured. Raises RunError where the baseline is such a row.
    """
    taken: dict[str, list[dict[str, Any]]] = {row.key: [] for row in rows}
    absent = {row.key: row.absent for row in rows}
    listener(Event("stage_started", "techniques"))
    for number in range(rounds):
        for place, row in enumerate(rows):
            if absent[row.key]:
                continue
            listener(Event("progress", "techniques", row.title, number * len(rows) + place, rounds * len(rows)))
            try:
                taken[row.key].append(run_row(row, folders(row.model), job, number == 0))
            except LlmoptError as error:
                if row.key == BASELINE:
                    raise
                absent[row.key] = str(error)
    listener(Event("stage_finished", "techniques", f"{rounds} rounds"))
    return [_row(row, absent[row.key], taken) for row in rows]


def _row(row: Technique, absent: str, taken: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The row of the table: see docs/bench.md."""
    head = {
        "key": row.key,
        "title": row.title,
        "against": row.against,
        "model": row.model,
        "options": row.options,
        "at_once": row.at_once,
        "absent": absent or None,
    }
    rounds = taken[row.key]
    if absent or not rounds:
        return head
    seconds = [one["result"].duration for one in rounds]
    baseline = [one["result"].duration for one in taken[BASELINE]]
    last = rounds[-1]
    shares = [one["foreign_cpu"] for one in rounds if one["foreign_cpu"] is not None]
    other = [one["result"].duration for one in taken[row.against]] if row.against else []
    return {
        **head,
        "seconds": spread(seconds),
        "speedup": spread([b / s for b, s in zip(baseline, seconds)]),
        "speedup_against": spread([b / s for b, s in zip(other, seconds)]) if other else None,
        "metrics": run_metrics(last["result"].records, last["result"].duration),
        "output_throughput": statistics.median(
            sum(record.output_tokens for record in one["result"].records) / one["result"].duration for one in rounds
        ),
        "speculation": last["result"].speculation,
        "memory": {**last["result"].memory, "rss_bytes": max(one["result"].memory["rss_bytes"] for one in rounds)},
        "weight_bytes": last["about"]["weight_bytes"],
        "perplexity": rounds[0]["perplexity"],
        "scored_tokens": rounds[0]["scored_tokens"],
        "same_answers": same_answers(rounds[0]["result"], taken[BASELINE][0]["result"]),
        "foreign_cpu": max(shares) if shares else None,
        "cpu_seconds": spread([one["cpu_seconds"] for one in rounds]) if last["cpu_seconds"] is not None else None,
        "energy": last["energy"],
        "notes": last["about"]["notes"],
        "rounds": [{"duration_s": one["result"].duration, "records": _records(one["result"])} for one in rounds],
    }


def same_answers(result: Result, reference: Result) -> dict[str, Any]:
    """How many answers equal the reference's token for token, and the mean share of tokens before the first that
    differs."""
    whole, shares = 0, []
    for own, other in zip(result.records, reference.records):
        mine, theirs = own.token_ids or [], other.token_ids or []
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
        whole += mine == theirs
        shares.append(same / max(len(theirs), 1))
    return {"equal": whole, "of": len(shares), "mean_share_before_difference": statistics.fmean(shares)}


def _records(result: Result) -> list[dict[str, Any]]:
    return [record.as_dict() for record in result.records]
