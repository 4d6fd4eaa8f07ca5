"""A fused decoder's proof: its logits against those of the model that it was built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from .recognize import UnsupportedModel

if TYPE_CHECKING:
    from .decoder import FusedDecoder

PROBE_TOKENS = 24
BLOCK_SIZE = 32
ERROR_LIMITS = {"float32": 1e-3, "bfloat16": 0.3, "int8": 0.6, "int4": 0.6}
"""Most relative error by the coarsest step between the model's arithmetic and the decoder's. Random tokens are hard on
a trained model: SmolLM2-135M's own bfloat16 logits stand 0.10 from its float32 ones on this probe (0.014 on text). A
wrong or missing part stands near 1 and above."""


@dataclass(frozen=True)
class Proof:
    """relative_error: ‖model − decoder‖ / ‖model‖ of the logits, each row less its mean; limit on it; mean_kl in nats a
    token; max_difference of two logits; number of tokens compared; expected: the model's logits, float32 [tokens,
    vocab], until a load record has them."""

    relative_error: float
    limit: float
    mean_kl: float
    max_difference: float
    tokens: int
    expected: torch.Tensor | None = field(default=None, repr=False, compare=False)


def probe_tokens(vocab: int) -> torch.Tensor:
    """The probe: fixed pseudo-random ids [PROBE_TOKENS]."""
    return torch.randint(0, vocab, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def expected_logits(model: nn.Module, vocab: int) -> torch.Tensor:
    """The model's own logits for the probe, float32 [PROBE_TOKENS, vocab]."""
    return model(input_ids=probe_tokens(vocab).unsqueeze(0), use_cache=False).logits[0].float()


def decoder_logits(decoder: FusedDecoder, ids: torch.Tensor) -> torch.Tensor:
    """The decoder's logits for one sequence, float32 [len(ids), vocab], from a chunk and then single tokens."""
    blocks = -(-len(ids) // BLOCK_SIZE)
    dtype = torch.float32 if decoder.structure.dtype == torch.float32 else torch.bfloat16
    decoder.allocate_kv(blocks + 1, BLOCK_SIZE, dtype)
    table = torch.arange(blocks, 0, -1)
    at = torch.arange(len(ids))
    slots = table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    chunk = max(1, len(ids) - 5)
    out = []
    for first, last in [(0, chunk), *((i, i + 1) for i in range(chunk, len(ids)))]:
        part = slice(first, last)
        rows = torch.arange(last - first)
        out.append(
            decoder.forward(ids[part], at[part], slots[part], [0, last - first], [last], table.unsqueeze(0), rows)
        )
    return torch.cat(out)


def compare(expected: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Relative error and mean KL, as `Proof` has them, of logits [tokens, vocab]; in float64, a token at a time."""
    kl = apart = size = 0.0
    for want, have in ((one.double(), other.double()) for one, other in zip(expected, got)):
        p, q = want.log_softmax(-1), have.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        want = want - want.mean()
        apart += float((want - have + have.mean()).square().sum())
        size += float(want.square().sum())
    return (apart / size) ** 0.5 if size else float(apart > 0), kl / len(expected)


def check(decoder: FusedDecoder, expected: torch.Tensor) -> Proof:
    """Compares, and leaves the decoder without a KV cache. Raises UnsupportedModel where logits differ."""
    got = decoder_logits(decoder, probe_tokens(decoder.vocab_size))
    decoder.drop_kv()
    error, kl = compare(expected, got)
    steps = {"float32" if decoder.structure.dtype == torch.float32 else "bfloat16"}
    int8_inputs = any(key.endswith("/int8") for key in decoder.linear_formats)
    if int8_inputs or "int8" in (decoder.options.weights, decoder.options.lm_head):
        steps.add("int8")
    if decoder.options.weights == "bfloat16":
        steps.add("bfloat16")
    if decoder.options.lm_head == "int4":
        steps.add("int4")
    limit = max(ERROR_LIMITS[step] for step in steps)
    proof = Proof(error, limit, kl, float((expected - got).abs().max()), len(expected), expected)
    if not error <= limit:
        raise UnsupportedModel(
            f"the fused decoder's logits differ from the model's: relative error {error:.3g} over {proof.tokens} "
            f"tokens, at most {limit} allowed; mean KL {kl:.3g} nats, largest difference {proof.max_difference:.3g}"
        )
    return proof
