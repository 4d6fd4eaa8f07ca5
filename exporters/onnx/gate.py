"""The proof of a written graph: a fresh process runs it, and what it answers is held against the torch model.

The torch model is the one that the graph was written from, its packed weights dequantized in float32; it chooses tokens
in float32, and gives the logits in float64. A batch of prompts of unequal length runs as one, a long one alone and in
two pieces; then both continue the same tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...optimizer.base import Context
from ...optimizer.errors import RunError
from ...runtime.kernels.scaled import ScaledLinear
from .float64 import float64_logits
from .settings import Choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .written import Written

TEXTS = (
    "Water boils",
    "The capital of France is",
    "Once upon a time there was a fisherman who lived with his wife in a hut close by the sea, and every day he went",
    "The first thing to know about a river is where it comes from. Rain falls on the hills and sinks into the ground, "
    "springs carry it out again, and streams gather it until the valley is too small for them. ",
)
PLAIN_LENGTH, LONGEST = 96, 1200
"""Tokens of the long prompt without sliding windows, and at most with them."""
POSITIONS = 48
"""Positions of a prompt whose logits are compared."""
TOLERANCE = 1e-4
"""Largest difference between the logits of a graph computed in float32 and those of torch in float64."""
ROUNDING_SHARE = 4.0
"""A graph may differ by as many times the difference of torch's own float32 logits, where that is more: the roundings
of a large model with large logits are beyond TOLERANCE in any order of its sums."""
LARGEST_SHARE = 1e-3
"""But by no more than this share of the largest logit: where torch itself is as far off, nothing is proved."""
MEAN_SHARE = 0.25
"""Largest mean difference, as a share of the largest one."""
MAX_KL = {"int8": 0.02, "float16": 0.005}
"""Mean KL in nats a token, where products take inputs rounded to int8, or everything is float16."""


def prove_graph(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    choices: Choices,
    written: Written,
    num_tokens: int,
    context: Context,
) -> dict[str, Any]:
    """Figures of how the graph in `folder` answers. Raises RunError where it is not the model.

    num_tokens: of each prompt's greedy continuation, which has to be the model's but where its two best logits are
    nearer to each other than the tolerance.
    """
    prompts = make_prompts(tokenizer, module, num_tokens)
    reference = context.workdir / "onnx-reference.npz"
    found = write_reference(module, prompts, num_tokens, reference)
    figures = run_check(folder, reference, choices, found.tolerance)
    judge(figures, choices, written, found.tolerance, str(folder))
    return {**figures, "torch_max_difference": found.torch_difference, "largest_logit": found.largest}


def make_prompts(tokenizer: PreTrainedTokenizerBase, module: PreTrainedModel, num_tokens: int) -> list[list[int]]:
    """Token ids of the prompts, the long one last: longer than the model's sliding windows, where it has any."""
    from ...runtime.chat import context_length

    windows = [getattr(layer, "sliding_window", None) for layer in module.modules()]
    windows.append(getattr(module.config.get_text_config(), "sliding_window", None))
    window = max((int(w) for w in windows if isinstance(w, int)), default=0)
    limit = (context_length(module.config) or 2048) - num_tokens - 1
    length = max(2, min(window + 24 if window else PLAIN_LENGTH, LONGEST, limit))
    prompts = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
    long = prompts[-1]
    prompts[-1] = (long * (length // len(long) + 1))[:length]
    return [prompt[:length] for prompt in prompts]


@dataclass(frozen=True)
class Reference:
    """What `write_reference` found. largest: the largest magnitude of a logit; torch_difference: how far torch's own
    float32 logits are from the reference, 0 where they are the reference."""

    largest: float
    torch_difference: float

    @property
    def tolerance(self) -> float:
        """Largest difference of logits that a graph computed in float32 may have."""
        return max(TOLERANCE, min(ROUNDING_SHARE * self.torch_difference, LARGEST_SHARE * self.largest))


def write_reference(module: PreTrainedModel, prompts: list[list[int]], num_tokens: int, path: Path) -> Reference:
    """Write what the torch model answers: logits of some positions of each prompt, greedy tokens, and their logits.

    The tokens are those of float32. The logits are computed in float64 from the float32 weights, and then rounded to
    float32; in float32 where layers round their inputs, which is part of such a model.
    """
    arrays: dict[str, Any] = {"count": np.array(len(prompts))}
    largest = difference = 0.0
    exact = not any(isinstance(layer, ScaledLinear) for layer in module.modules())
    for number, prompt in enumerate(prompts):
        kept = np.unique(np.linspace(0, len(prompt) - 1, POSITIONS).astype(np.int64))
        tokens, logits = _greedy(module, prompt, num_tokens, kept)
        if exact:
            text, steps = [*prompt, *tokens[:-1]], np.arange(len(prompt) - 1, len(prompt) - 1 + num_tokens)
            rounded, logits = logits, float64_logits(module, text, np.concatenate([kept, steps]))
            difference = max(difference, float(np.abs(rounded - logits).max()))
        largest = max(largest, float(np.abs(logits).max()))
        arrays[f"prompt_{number}"], arrays[f"positions_{number}"] = np.array(prompt), kept
        arrays[f"tokens_{number}"] = np.array(tokens)
        arrays[f"prefill_{number}"], arrays[f"steps_{number}"] = np.split(logits.astype(np.float32), [len(kept)])
    np.savez(path, **arrays)
    return Reference(largest, difference)


def _greedy(
    module: PreTrainedModel, prompt: list[int], num_tokens: int, kept: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """The greedy continuation, and the float32 logits of the kept positions and of each step, step by step with a
    cache."""
    import torch

    from ...runtime.cached_forward import CachedForward

    forward = CachedForward(module)
    cache, tokens = forward.new_cache(), list(prompt)
    logits = forward(torch.tensor([prompt]), cache, len(prompt), [prompt])[0]
    rows = [logits[torch.from_numpy(kept)]]
    for step in range(num_tokens):
        rows.append(logits[-1:])
        tokens.append(int(logits[-1].argmax()))
        if step + 1 < num_tokens:
            logits = forward(torch.tensor([tokens[-1:]]), cache, 1, [tokens])[0]
    return tokens[len(prompt) :], torch.cat(rows).numpy()


def run_check(folder: Path, reference: Path, choices: Choices, tolerance: float) -> dict[str, Any]:
    """What the fresh process found. Raises RunError with its last line."""
    out = reference.with_suffix(".json")
    command = [sys.executable, "-m", f"{__package__}.check", str(folder.resolve()), str(reference), str(out)]
    command += ["--tolerance", repr(tolerance)]
    if choices.accuracy_level:
        command.append("--twin")
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=reference.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not out.is_file():
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise RunError(f"the graph does not run in a fresh process: {reason}", str(folder))
    return json.loads(out.read_text(encoding="utf-8"))


def judge(figures: dict[str, Any], choices: Choices, written: Written, limit: float, where: str) -> None:
    """Raise RunError where the figures are not the model's. limit: largest difference of logits in float32."""
    rounded = "int8" in written.counts
    failures = []
    if not rounded and choices.dtype != "float16":
        prefix = "float_" if choices.accuracy_level else ""
        for name in ("prefill_max_difference", "decode_max_difference"):
            if not figures[prefix + name] <= limit:
                failures.append(f"{prefix}{name} is {figures[prefix + name]:.3g}, above {limit:.3g}")
        for name in ("prefill_mean_difference", "decode_mean_difference"):
            if not figures[prefix + name] <= limit * MEAN_SHARE:
                failures.append(f"{prefix}{name} is {figures[prefix + name]:.3g}, above {limit * MEAN_SHARE:.3g}")
        if figures[f"{prefix}greedy_differing"]:
            failures.append(f"{figures[f'{prefix}greedy_differing']} greedy tokens differ")
    if not choices.exact or rounded:
        most = MAX_KL["int8" if rounded or choices.accuracy_level else "float16"]
        if not figures["mean_kl"] <= most:
            failures.append(f"mean KL is {figures['mean_kl']:.3g}, above {most}")
    if failures:
        raise RunError(
            f"the graph does not compute what the model does: {'; '.join(failures)}",
            where,
            "Report this as a bug in llmopt, with the model's config.json",
        )
