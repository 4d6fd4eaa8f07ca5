"""Where two models' greedy texts part: the first differing token of each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import UsageError
from .texts import read_text

if TYPE_CHECKING:
    from ..runtime.completion import Completion
    from ..runtime.llm import LLM

PROMPTS = (
    "The capital of France is",
    "Water boils when",
    "Once upon a time",
    "The three primary colours are",
    "To make a cup of tea, first",
    "In the year 1969,",
    "The speed of light is",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n",
    "The main difference between a virus and a bacterium is",
    "Q: What is 17 + 25?\nA:",
    "The opposite of 'generous' is",
    "She opened the door and saw",
    "Here is a list of five fruits:\n1.",
    "Translate to French: Good morning, my friend.\n",
    "Photosynthesis is the process by which",
)
"""Prompts of `llmopt eval` where no file of prompts is given."""


def read_prompts(path: str | Path) -> list[str]:
    """The lines of a text file that are not blank; `\\n` in a line stands for a line break."""
    return [line.replace("\\n", "\n") for line in read_text(path).splitlines() if line.strip()]


def continuations(llm: LLM, prompts: Sequence[str], new_tokens: int) -> list[tuple[list[int], str]]:
    """Greedy (token ids, text) of each prompt, all run together."""
    done: list[Completion] = llm.generate(list(prompts), max_new_tokens=new_tokens)  # type: ignore[assignment]
    return [(one.token_ids, one.text) for one in done]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Number of tokens before the first that differs; None where the two are equal. A text that ends differs there."""
    for place, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def generation_divergence(model: LLM, other: LLM, prompts: Sequence[str], new_tokens: int) -> dict[str, Any]:
    """Greedy texts of both models side by side.

    `prompts`: for each `prompt`, the texts `model` and `against` with their `model_token_ids` and `against_token_ids`,
    `same_text` (what both wrote before they part) and `first_difference` (see there). `share_differing_within`: for
    n = 1, 2, 4 … `new_tokens` the share of prompts whose texts differ within n tokens. `mean_equal_tokens`: tokens
    before the first difference, `new_tokens` where there is none. Raises UsageError where a number is impossible.
    """
    if new_tokens < 1:
        raise UsageError(f"{new_tokens} new tokens compare nothing", "new_tokens", "Use 1 or more.")
    if not prompts:
        raise UsageError("no prompt is given", "prompts")
    rows: list[dict[str, Any]] = []
    mine, theirs = continuations(model, prompts, new_tokens), continuations(other, prompts, new_tokens)
    for prompt, (ids, text), (other_ids, other_text) in zip(prompts, mine, theirs):
        place = first_difference(ids, other_ids)
        rows.append(
            {
                "prompt": prompt,
                "model": text,
                "against": other_text,
                "same_text": model.tokenizer.decode(ids[:place], skip_special_tokens=True),
                "first_difference": place,
                "model_token_ids": list(ids),
                "against_token_ids": list(other_ids),
            }
        )
    found = [row["first_difference"] for row in rows]
    within = {n: sum(place is not None and place < n for place in found) / len(found) for n in _counts(new_tokens)}
    return {
        "new_tokens": new_tokens,
        "num_prompts": len(rows),
        "num_differing": sum(place is not None for place in found),
        "share_differing_within": {str(n): share for n, share in within.items()},
        "mean_equal_tokens": sum(new_tokens if place is None else place for place in found) / len(found),
        "prompts": rows,
    }


def _counts(new_tokens: int) -> list[int]:
    counts, n = [], 1
    while n < new_tokens:
        counts.append(n)
        n *= 2
    return [*counts, new_tokens]
