"""The eager runner around the model: layout of a step, size of the pool, self-check, and giving the model back."""

from __future__ import annotations

import random

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.attention.interface import ATTENTION_NAME
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.protocols import ModelRunner
from llmopt.runtime.engine.runner import EagerRunner
from llmopt.runtime.engine.runner_inputs import BatchBuilder, to_device

VOCAB = 97


def tiny() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("seed", range(8))
def test_layout_is_what_the_plan_says(seed: int) -> None:
    """Every array against the definition in `Row`, one token at a time."""
    rng = random.Random(seed)
    size = rng.choice([1, 4, 16])
    builder = BatchBuilder(size, 500)
    longest = 1 if seed % 3 == 0 else 20
    rows = []
    for i in range(rng.randint(1, 9)):
        start, count = rng.randint(0, 40), rng.randint(1, longest)
        table = tuple(rng.sample(range(500), -(-(start + count) // size) + rng.randint(0, 2)))
        wanted = 1 if longest == 1 else rng.randint(0, count)
        rows.append(Row(i, start, tuple(rng.choices(range(VOCAB), k=count)), table, wanted))
    plan = StepPlan(tuple(rows))
    step = to_device(builder.arrays(plan), torch.device("cpu"))
    logit_rows: list[int] = []
    tokens, positions, slots, bounds = [], [], [], [0]
    for row in rows:
        for i, token in enumerate(row.token_ids):
            at = row.start + i
            tokens.append(token)
            positions.append(at)
            slots.append(row.block_table[at // size] * size + at % size)
        bounds.append(len(tokens))
        logit_rows += range(len(tokens) - row.num_logits, len(tokens))
    assert step.token_ids[0].tolist() == tokens and step.positions[0].tolist() == positions
    assert step.batch.slots.tolist() == slots and step.logit_rows.tolist() == logit_rows
    assert step.batch.cu_seqlens_q.tolist() == bounds
    assert step.batch.seq_lens.tolist() == [row.end for row in rows]
    assert step.batch.max_q == max(len(r.token_ids) for r in rows) and step.batch.max_k == max(r.end for r in rows)
    for row, table in zip(rows, step.batch.block_tables.tolist()):
        assert tuple(table[: len(row.block_table)]) == row.block_table


def test_a_request_that_comes_back_has_its_new_blocks() -> None:
    builder = BatchBuilder(4, 10)
    builder.arrays(StepPlan((Row(0, 0, (1, 2, 3), (5,), 1),)))
    grown = builder.arrays(StepPlan((Row(0, 3, (4, 5), (5, 2), 1),)))
    moved = builder.arrays(StepPlan((Row(0, 0, (1, 2, 3, 4, 5), (7, 8), 1),)))
    assert grown.slots.tolist() == [23, 8] and moved.slots.tolist() == [28, 29, 30, 31, 32]


def test_pool_keeps_to_its_budget() -> None:
    model = tiny()
    runner = EagerRunner(model, block_size=4, kv_cache_memory=100_000, attention="torch")
    assert runner.pool.nbytes <= 100_000 < runner.pool.nbytes * (runner.num_blocks + 2) / (runner.num_blocks + 1)
    runner.close()
    small = EagerRunner(model, block_size=4, kv_cache_memory=1 << 30, max_num_seqs=2, attention="torch")
    assert small.num_blocks == 2 * 64 // 4, "a pool that nobody could fill is waste"
    small.close()
    with pytest.raises(RunError, match="holds no block"):
        EagerRunner(model, block_size=4, kv_cache_memory=1000, attention="torch")


def test_length_is_the_models() -> None:
    model = tiny()
    with pytest.raises(UsageError, match="64"):
        EagerRunner(model, num_blocks=8, max_model_len=65)
    runner = EagerRunner(model, num_blocks=8, max_model_len=32)
    assert isinstance(runner, ModelRunner) and runner.max_model_len == 32
    runner.close()


def test_closing_gives_the_model_back() -> None:
    model = tiny()
    before = model.config._attn_implementation
    ids = torch.tensor([[1, 2, 3]])
    want = model(ids).logits
    runner = EagerRunner(model, num_blocks=8)
    assert model.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(RunError, match="outside of it"):
        model(ids)
    runner.close()
    runner.close()
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, want)
    assert not any(hasattr(m, "llmopt_layer") for m in model.modules())
    with pytest.raises(RunError, match="closed"):
        runner.execute(StepPlan((Row(0, 0, (1,), (0,), 1),)))


def test_self_check_finds_a_model_that_ignores_its_positions() -> None:
    model = tiny()
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def by_index(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return forward(x, torch.arange(x.shape[1])[None])

    rotary.forward = by_index
    with pytest.raises(RunError, match="other logits than transformers"):
        EagerRunner(model, num_blocks=8)
    assert model.config._attn_implementation != ATTENTION_NAME
    EagerRunner(model, num_blocks=8, self_check=False).close()


def test_self_check_finds_a_state_beside_keys_and_values() -> None:
    """A convolution over neighbouring tokens mixes the rows of a flat batch."""
    model = tiny()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
    with pytest.raises(RunError, match="static-batch"):
        EagerRunner(model, num_blocks=8)


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    model = tiny()
    runner = EagerRunner(model, block_size=4, num_blocks=8, attention="torch")
    plan = StepPlan((Row(0, 0, (5, 6, 7), (2,), 1), Row(1, 0, (9,), (3,), 1)))
    want = runner.execute(plan).clone()
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        runner.execute(plan)
    handle.remove()
    assert torch.equal(runner.execute(plan), want)
    alone = torch.cat([runner.execute(StepPlan((row,))).clone() for row in plan.rows])
    torch.testing.assert_close(alone, want, atol=1e-5, rtol=1e-5)
    runner.close()


def test_an_empty_plan_and_one_without_logits() -> None:
    runner = EagerRunner(tiny(), block_size=4, num_blocks=8)
    assert runner.execute(StepPlan(())).shape == (0, VOCAB)
    assert runner.execute(StepPlan((Row(0, 0, (1, 2), (0,), 0),))).shape == (0, VOCAB)
    with pytest.raises(RunError, match="malformed row"):
        runner.execute(StepPlan((Row(0, 4, (1,), (0,), 1),)))
    runner.close()


def test_quantized_modules_stay_in_place() -> None:
    """Any module in a linear's place runs, also one that takes no empty batch."""
    model = tiny()

    class Rounded(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[-2] > 0, "an empty batch"
            scale = self.weight.abs().amax(1, keepdim=True) / 127
            return torch.nn.functional.linear(x, (self.weight / scale).round() * scale)

    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Rounded
    runner = EagerRunner(model, num_blocks=8)
    assert runner.self_check_error is not None and runner.self_check_error < 1e-4
    assert runner.execute(StepPlan((Row(0, 0, (1, 2), (0,), 0),))).shape == (0, VOCAB)
    runner.close()
