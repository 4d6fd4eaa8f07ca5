"""SamplingParams in llama-server's terms, and what has none."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ...optimizer.errors import UsageError
from ..engine.request import Request
from ..engine.sampling_params import SamplingParams

ORDER = ["penalties", "temperature", "top_k", "top_p", "min_p"]
"""llama.cpp's samplers in the order in which SamplingParams processes logits."""
WITHOUT = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "regex": None}
"""Parameters that llama-server has no equivalent of, and what leaves them unused. (Its presence and frequency penalties
count the prompt's tokens too.)"""


def check(params: SamplingParams) -> None:
    """Raise UsageError for a parameter that llama-server cannot follow."""
    for name, neutral in WITHOUT.items():
        if getattr(params, name) != neutral:
            raise UsageError(
                f"llama.cpp has no equivalent of {name}",
                f"sampling parameter {name}",
                "Leave it out, or load the artifact that this GGUF file was made from",
            )
    if params.constrained and (params.logprobs is not None or params.min_tokens):
        raise UsageError(
            "llama.cpp's structured output goes with neither logprobs nor min_tokens here",
            "sampling parameter json_schema",
            "Leave one of them out",
        )


def body(request: Request, slot: int, count: int, ends: frozenset[int]) -> dict[str, Any]:
    """The request for the next `count` tokens of a sequence.

    ends: token ids that are impossible before `min_tokens`. The random numbers come from the request's key and the
    number of tokens so far.
    """
    params = request.params
    bias: list[list[Any]] = [[token, value] for token, value in params.logit_bias.items()]
    if request.num_output_tokens < params.min_tokens:
        bias += [[token, False] for token in ends]
    found: dict[str, Any] = {
        "prompt": request.token_ids,
        "n_predict": count,
        "id_slot": slot,
        "cache_prompt": True,
        "return_tokens": True,
        "samplers": ORDER,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": request.num_tokens + count,
        "seed": seed(request.key, request.num_output_tokens),
        "logit_bias": bias,
    }
    if params.json_schema is not None:
        schema = params.json_schema
        found["json_schema"] = json.loads(schema) if isinstance(schema, str) else schema
    return found


def seed(key: int, position: int) -> int:
    """32 bits from a request's key and a position."""
    digest = hashlib.blake2b(f"{key}:{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
