"""The proof of a written graph: a fresh process runs it, and what it answers is held against the torch model.

The torch model is the one that the graph was written from, in float32, its packed weights dequantized in float32. A
batch of prompts of unequal length runs as one, a long one alone and in two pieces; then both continue the same tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...optimizer.base import Context
from ...optimizer.errors import RunError
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
"""Largest difference of logits in float32, for logits up to 10; beyond, it grows with the largest logit, as float32's
rounding does."""
MEAN_SHARE = 0.1
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
    scale = write_reference(module, prompts, num_tokens, reference)
    figures = run_check(folder, reference, choices, scale)
    judge(figures, choices, written, scale, str(folder))
    return figures


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


def write_reference(module: PreTrainedModel, prompts: list[list[int]], num_tokens: int, path: Path) -> float:
    """Write what the torch model answers: logits of some positions of each prompt, greedy tokens, and their logits.

    Returns the largest magnitude of a logit.
    """
    import torch

    from ...runtime.cached_forward import CachedForward

    forward = CachedForward(module)
    arrays: dict[str, Any] = {"count": np.array(len(prompts))}
    largest = 0.0
    for number, prompt in enumerate(prompts):
        cache = forward.new_cache()
        kept = np.unique(np.linspace(0, len(prompt) - 1, POSITIONS).astype(np.int64))
        logits = forward(torch.tensor([prompt]), cache, len(prompt), [prompt])[0]
        arrays[f"prompt_{number}"], arrays[f"positions_{number}"] = np.array(prompt), kept
        arrays[f"prefill_{number}"] = logits[torch.from_numpy(kept)].numpy()
        tokens, steps = list(prompt), []
        for _ in range(num_tokens):
            steps.append(logits[-1])
            tokens.append(int(logits[-1].argmax()))
            logits = forward(torch.tensor([tokens[-1:]]), cache, 1, [tokens])[0]
        arrays[f"tokens_{number}"] = np.array(tokens[len(prompt) :])
        arrays[f"steps_{number}"] = torch.stack(steps).numpy()
        largest = max(largest, float(np.abs(arrays[f"prefill_{number}"]).max()))
    np.savez(path, **arrays)
    return largest


def run_check(folder: Path, reference: Path, choices: Choices, scale: float) -> dict[str, Any]:
    """What the fresh process found. Raises RunError with its last line."""
    out = reference.with_suffix(".json")
    command = [sys.executable, "-m", f"{__package__}.check", str(folder.resolve()), str(reference), str(out)]
    command += ["--tolerance", repr(tolerance(scale))]
    if choices.accuracy_level:
        command.append("--twin")
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=reference.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not out.is_file():
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise RunError(f"the graph does not run in a fresh process: {reason}", str(folder))
    return json.loads(out.read_text(encoding="utf-8"))


def tolerance(scale: float) -> float:
    """Largest difference of logits up to `scale`."""
    return TOLERANCE * max(1.0, scale / 10)


def judge(figures: dict[str, Any], choices: Choices, written: Written, scale: float, where: str) -> None:
    """Raise RunError where the figures are not the model's."""
    limit = tolerance(scale)
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
