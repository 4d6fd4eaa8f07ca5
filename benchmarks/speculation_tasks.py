"""The tasks of `speculation.py`: prompts that differ in how much of the answer stands in the prompt."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

TASKS = ("copy/edit", "summary", "JSON", "free text")
WORDS = ("river", "engine", "garden", "letter", "winter", "market", "teacher", "island", "window", "signal", "bridge")
NAMES = ("Ada", "Boris", "Chen", "Dana", "Emil", "Fatou", "Goran", "Hana", "Ivo", "Jun", "Kira", "Liam")
TOWNS = ("Oslo", "Quito", "Lyon", "Graz", "Perth", "Turin", "Kyoto", "Ghent")
STORY = (
    "Tell a story about a {} and a {}.", "Explain to a child why a {} needs a {}.",
    "Write a letter to a friend in which a {} and a {} appear.", "What would happen if every {} became a {}?",
)  # fmt: skip


def passages(text: str, words: int) -> list[str]:
    """Runs of about so many words that begin with a sentence, in order."""
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", text) if 30 < len(s) < 400]
    found, now = [], ""
    for sentence in sentences:
        now = f"{now} {sentence}".strip()
        if len(now.split()) >= words:
            found.append(now)
            now = ""
    return found


def copy_or_edit(number: int, rng: random.Random, text: list[str]) -> str:
    """A text to be written again, as it is or with a name changed, begun with its first words."""
    passage = text[number % len(text)]
    again = passage
    if number % 2:
        word = max(set(re.findall(r"\b[a-z]{5,}\b", passage)), key=len, default="text")
        again = passage.replace(word, "example")
        return f"{passage}\n\nThe same text with {word!r} replaced by 'example':\n{' '.join(again.split()[:12])}"
    return f"{passage}\n\nThe same text once more:\n{' '.join(again.split()[:12])}"


def summary(number: int, rng: random.Random, text: list[str]) -> str:
    return f"Summarize the following text in a few sentences.\n\n{text[(number + 7) % len(text)]}"


def json_records(number: int, rng: random.Random, text: list[str]) -> str:
    """A table to be written as JSON, begun with its first two records."""
    rows = [(rng.choice(NAMES), rng.randrange(18, 80), rng.choice(TOWNS)) for _ in range(12)]
    lines = "\n".join(f"{name}, {age} years, {town}" for name, age, town in rows)
    begun = "".join(f'  {{"name": "{n}", "age": {a}, "town": "{t}"}},\n' for n, a, t in rows[:2])
    return f"{lines}\n\nThe same as JSON:\n[\n{begun}"


def free_text(number: int, rng: random.Random, text: list[str]) -> str:
    return STORY[number % len(STORY)].format(*rng.sample(WORDS, 2))


MAKERS: dict[str, Callable[[int, random.Random, list[str]], str]] = {
    "copy/edit": copy_or_edit,
    "summary": summary,
    "JSON": json_records,
    "free text": free_text,
}
CHATS = ("summary", "free text")
"""Tasks that are asked as a chat; the others are texts to be continued."""


def prompts(tokenizer: object, text: str, task: str, count: int) -> list[list[int]]:
    """Token ids of `count` different prompts."""
    parts, made = passages(text, 130), []
    for number in range(count):
        words = MAKERS[task](number, random.Random(f"{task} {number}"), parts)
        if task in CHATS and getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": words}]
            words = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
                messages, tokenize=False, add_generation_prompt=True
            )
        made.append(list(tokenizer(words, verbose=False)["input_ids"]))  # type: ignore[operator]
    return made
