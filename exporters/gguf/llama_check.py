"""llama.cpp's part of the proof: its log, its tokens, its log-probabilities along the torch model's greedy texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...optimizer.errors import RunError
from ...runtime.llamacpp.open import placement
from ...runtime.llamacpp.server import LlamaServer
from ...runtime.llamacpp.slots import LlamaSlots
from ...runtime.tokenizer_files import open_tokenizer
from .exporter import FILE
from .metadata import original_length, rope_parameters

PROMPTS = ("The capital of France is", "Water boils when", "Once upon a time")
NEW_TOKENS = 32
TEXTS = (
    "Hello, world! It's 1234567 o'clock — they'll say \"yes\".",
    "  two spaces\tand a tab\n\n\nthree lines,   then the end ",
    "Füße, 東京, Привет, नमस्ते and 🙂🚀 in one line; x = a[i]+= 0x1F // (y - 3.14)",
    "def f(x):\n    return {'a': x**2, 'b': [1, 22, 333, 4444]}\n",
)
"""Texts that llama.cpp has to split as the tokenizer does."""
TOLERANCE = {"F32": 0.01, "F16": 0.05, "BF16": 0.15}
BLOCKS = 0.6
"""Largest difference of a log-probability, in nats, by the coarsest type in the file: llama.cpp rounds what enters a
product to float16 or bfloat16, and to 8 bits in blocks of 32 where the weight is quantized."""
MEAN_SHARE = 0.25
"""Largest mean difference as a share of that."""
WARNINGS = ("missing pre-tokenizer", "GENERATION QUALITY WILL BE DEGRADED", "missing or unrecognized pre-tokenizer")


def check_llama(module: Any, folder: Path, program: Path, rules: dict[str, Any]) -> dict[str, Any]:
    """Figures. Raises RunError where llama.cpp answers otherwise than the torch model."""
    tokenizer = open_tokenizer(folder)
    limit = min(1024, short_context(module.config))
    exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    arguments = ["-c", str(limit), "-np", "1", "--no-webui", *placement("cpu", {}), *exact]
    server = LlamaServer(program, folder / FILE, arguments)
    slots = LlamaSlots(server, tokenizer, (), module.config.vocab_size, limit, 1)
    try:
        texts = check_tokens(server, tokenizer)
        figures = compare(slots, module, tokenizer, tolerance(rules))
        log = server.log()
    finally:
        slots.close()
    for warning in WARNINGS:
        if warning.lower() in log.lower():
            raise RunError(f"llama.cpp warns of it: {warning}", str(folder / FILE))
    return {"llama_cpp": "done", "texts_of_equal_tokens": texts, **figures}


def short_context(config: Any) -> int:
    """Tokens of context in which llama.cpp takes LongRoPE's short factors, as transformers does for short texts.

    llama.cpp chooses by the context that is reserved, transformers by the text's length.
    """
    rope = rope_parameters(config)
    if rope.get("rope_type") == "longrope":
        return original_length(config, rope)
    return int(config.max_position_embeddings)


def tolerance(rules: dict[str, Any]) -> float:
    """By the coarsest type among matrices."""
    return max(TOLERANCE.get(rule["kind"], BLOCKS) for rule in rules.values())


def check_tokens(server: LlamaServer, tokenizer: Any) -> int:
    """The number of texts. Raises RunError for one of which llama.cpp makes other tokens than the tokenizer."""
    for text in TEXTS:
        ours = list(tokenizer(text)["input_ids"])
        found = server.ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        if found != ours:
            place = next((i for i, (a, b) in enumerate(zip(found, ours)) if a != b), min(len(found), len(ours)))
            raise RunError(
                f"llama.cpp makes other tokens of {text!r}: from number {place} on {found[place : place + 4]}, the "
                f"tokenizer {ours[place : place + 4]}",
                "tokenizer",
                "Name the right pre-tokenizer with --set pre_tokenizer=NAME",
            )
    return len(TEXTS)


def compare(slots: LlamaSlots, module: Any, tokenizer: Any, limit: float) -> dict[str, Any]:
    """Log-probabilities along the torch model's greedy texts, and whether llama.cpp would choose the same tokens.

    Where it chooses another, the torch model's two must be nearer to each other than `limit`.
    """
    from ...runtime.cached_forward import CachedForward

    forward = CachedForward(module)
    differences, others = [], 0
    for prompt in PROMPTS:
        tokens = list(tokenizer(prompt)["input_ids"])
        for token, logprobs in greedy(forward, tokens):
            found = slots.forced(tokens, token, 1, 0)
            chosen = found.top[0][0]
            differences.append(abs(found.logprob - float(logprobs[token])))
            if chosen != token:
                others += 1
                margin = float(logprobs[token] - logprobs[chosen])
                if margin > 2 * limit:
                    where = f"{prompt!r}, new token {len(tokens)}"
                    raise RunError(f"llama.cpp chooses token {chosen}, the torch model {token}", where)
            tokens.append(token)
    largest, mean = max(differences), sum(differences) / len(differences)
    if not (largest <= limit and mean <= limit * MEAN_SHARE):
        raise RunError(
            f"llama.cpp's log-probabilities differ by up to {largest:.3g} and {mean:.3g} on average from the torch "
            f"model's; {limit:.3g} and {limit * MEAN_SHARE:.3g} are allowed",
            FILE,
        )
    return {
        "compared_tokens": len(differences),
        "greedy_near_ties": others,
        "logprob_max_difference": largest,
        "logprob_mean_difference": mean,
        "logprob_tolerance": limit,
    }


def greedy(forward: Any, prompt: list[int]) -> Any:
    """The torch model's greedy tokens after a prompt, each with all log-probabilities float32 [V]."""
    import torch

    cache, tokens = forward.new_cache(), list(prompt)
    logits = forward(torch.tensor([tokens]), cache, 1, [tokens])[0, -1]
    for _ in range(NEW_TOKENS):
        token = int(logits.argmax())
        yield token, logits.float().log_softmax(-1)
        tokens.append(token)
        logits = forward(torch.tensor([[token]]), cache, 1, [tokens])[0, -1]
