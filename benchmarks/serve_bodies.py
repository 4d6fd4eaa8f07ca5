"""Bodies for attacks on a server: valid ones, and mutations of them that a fuzzer would send."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

COMPLETION: dict[str, Any] = {
    "prompt": "The sky is",
    "max_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 1,
    "seed": 5,
    "stop": ["###"],
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "logit_bias": {"11": -3.5},
    "logprobs": 2,
    "echo": False,
    "stream": False,
    "user": "someone",
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "stop_token_ids": [7],
    "min_tokens": 1,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_token_ids": True,
    "deadline": 20.0,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "max_completion_tokens": 3,
    "temperature": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"thinking": False},
}
SCHEMA: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "JSON, please"}]}],
    "max_tokens": 4,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "answer",
            "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    },
}
TOKENIZE: dict[str, Any] = {"prompt": "Hello you", "add_special_tokens": True, "return_token_strs": True}
DETOKENIZE: dict[str, Any] = {"tokens": [5, 6, 7]}
GENERATE: dict[str, Any] = {"prompt": "Hello", "max_new_tokens": 3, "temperature": 0.0, "stop": "x", "top_k": 5}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "n": 2}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "echo": True, "logprobs": 1}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", SCHEMA),
    ("/tokenize", TOKENIZE),
    ("/detokenize", DETOKENIZE),
    ("/generate", GENERATE),
]
ODD: list[Any] = [
    *[None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, -1e308, 10**30, -(2**63), 2**31, 2**64],
    *["", "a", "0", "\x00", "\ud800", "é漢字🙂", "a" * 3000, "auto", "required"],
    *[[], {}, [[]], [None], [0], [1, "a"], [[1], [2.5]], ["x"] * 200, list(range(50))],
    *[{"a": {}}, {"type": "object"}, {"-1": 1}, {"999999999": 1}, {"include_usage": 1}, {"type": "json_object"}],
    {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
    *[[{"role": "user"}], [{"role": "", "content": ""}], [{"type": "function", "function": {"name": "f"}}]],
    *[float("nan"), float("inf")],
]
KEYS = ["model", "tools", "suffix", "best_of", "regex", "response_format", "logits", "__class__", "", "é", "functions"]
TYPES = ["application/json"] * 12 + [
    "text/plain",
    "",
    "application/x-www-form-urlencoded",
    "application/json; charset=utf-16",
]


def mutated(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """A path, a body and headers: something valid, spoilt once or a few times."""
    path, body = rng.choice(VALID)
    value: Any = copy.deepcopy(body)
    if rng.random() < 0.1:
        path = rng.choice([other for other, _ in VALID])
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        value = _spoil(value, rng)
    raw = json.dumps(value, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    if rng.random() < 0.25:
        raw = _damage(raw, rng)
    return path, raw, {"Content-Type": rng.choice(TYPES)}


def _spoil(value: Any, rng: random.Random) -> Any:
    """Change, add, drop or move one part of a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        action = rng.random()
        if action < 0.15:
            value[rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))
            return value
        key = rng.choice(list(value))
        if action < 0.3:
            del value[key]
        elif action < 0.4:
            value[rng.choice(list(value))] = copy.deepcopy(value[key])
        else:
            value[key] = _spoil(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        if rng.random() < 0.3:
            return value * rng.choice([0, 2, 50])
        value[at] = _spoil(value[at], rng)
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and rng.random() < 0.5:
        return value * rng.choice([-1, 0, 2, 10, 1000, 0.5])
    return copy.deepcopy(rng.choice(ODD))


def _damage(raw: bytes, rng: random.Random) -> bytes:
    """Bytes that are no longer JSON, or no longer UTF-8, or nested without end."""
    kind = rng.randrange(6)
    at = rng.randrange(len(raw) + 1)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at:]
    if kind == 2:
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    if kind == 3:
        return rng.choice([b"[", b'{"prompt":']) * rng.choice([50, 5000])
    if kind == 4:
        return rng.randbytes(rng.randrange(200))
    return raw + raw
