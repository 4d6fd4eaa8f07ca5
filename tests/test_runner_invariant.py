"""Batch invariance: the same bits for a token, whatever runs beside it and however its request was cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import UsageError
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.protocols import ModelRunner
from llmopt.runtime.engine.runner_select import build_runner

VOCAB, LENGTHS = 97, (41, 17, 30)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(architecture: str, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture, vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval().to(dtype)


def texts() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in LENGTHS]


def all_logits(runner: ModelRunner, seed: int) -> list[torch.Tensor]:
    """Logits of every position of every text, the texts cut and mixed at random."""
    rng = random.Random(seed)
    free = list(range(runner.num_blocks))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(-(-n // runner.block_size))] for n in LENGTHS]
    out = [torch.zeros(n, VOCAB) for n in LENGTHS]
    done = [0] * len(LENGTHS)
    while any(d < n for d, n in zip(done, LENGTHS)):
        rows = []
        for i, text in enumerate(texts()):
            count = min(rng.choice([0, 1, 1, 3, 11, 40]), len(text) - done[i])
            if count:
                rows.append(Row(i, done[i], tuple(text[done[i] : done[i] + count]), tuple(tables[i]), count))
                done[i] += count
        rng.shuffle(rows)
        got = runner.execute(StepPlan(tuple(rows)))
        for row in rows:
            out[row.request_id][row.start : row.end], got = got[: row.num_logits], got[row.num_logits :]
    return out


@pytest.mark.parametrize(
    ("architecture", "dtype", "attention"),
    [("llama", torch.float32, "torch"), ("qwen3", torch.bfloat16, "auto"), ("qwen3_moe", torch.float32, "torch")],
)
def test_same_bits_in_any_company(architecture: str, dtype: torch.dtype, attention: str) -> None:
    model = tiny(architecture, dtype)
    runner: Any = build_runner(model, batch_invariant=True, attention=attention, num_blocks=24)
    assert runner.tile == (1 if "moe" in architecture else 16)
    first = all_logits(runner, 1)
    for seed in (2,):
        for a, b in zip(first, all_logits(runner, seed)):
            assert torch.equal(a, b)
    runner.close()
    for text, got in zip(texts(), first):
        with torch.no_grad():
            want = model(torch.tensor([text]), use_cache=False).logits[0].float()
        error = float((got - want).norm() / want.norm())
        assert error < (1e-5 if dtype == torch.float32 else 0.05)


def test_notes_state_the_cost_and_other_runners_refuse() -> None:
    model = tiny("llama", torch.float32)
    runner: Any = build_runner(model, "eager", batch_invariant=True, num_blocks=8)
    assert any("throughput does not grow" in note for note in runner.notes)
    assert runner.execute(StepPlan((Row(0, 0, (5, 6), (1,), 0),))).shape == (0, VOCAB)
    runner.close()
    with pytest.raises(UsageError, match="not batch-invariant"):
        build_runner(model, "native", batch_invariant=True)
