"""The native runner over random schedules: each logit equals the model's own, one request alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.protocols import ModelRunner
from llmopt.runtime.engine.runner_select import KINDS, build_runner, options_of

VOCAB = 211


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_llama(**changes: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def native_or_skip(model: torch.nn.Module, **options: Any) -> Any:
    from llmopt.runtime.kernels.build import NativeUnavailable

    try:
        return build_runner(model, "native", **options)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def random_steps(runner: ModelRunner, texts: list[list[int]], seed: int) -> dict[tuple[int, int], torch.Tensor]:
    """Every request goes through in chunks of random length, some single tokens, in random company and order."""
    rng = random.Random(seed)
    free = list(range(runner.num_blocks))
    rng.shuffle(free)
    tables: dict[int, list[int]] = {i: [] for i in range(len(texts))}
    done = dict.fromkeys(tables, 0)
    logits = {}
    while any(done[i] < len(texts[i]) for i in done):
        running = [i for i in done if done[i] < len(texts[i])]
        rng.shuffle(running)
        single = rng.random() < 0.5
        rows = []
        for i in running[: rng.randint(1, len(running))]:
            count = 1 if single else min(rng.choice([1, 1, 2, 5, 33, 50]), len(texts[i]) - done[i])
            while len(tables[i]) * runner.block_size < done[i] + count:
                tables[i].append(free.pop())
            wanted = rng.randint(0, count)
            rows.append(Row(i, done[i], tuple(texts[i][done[i] : done[i] + count]), tuple(tables[i]), wanted))
            done[i] += count
        out = runner.execute(StepPlan(tuple(rows)))
        owners = [(r.request_id, p) for r in rows for p in range(r.end - r.num_logits, r.end)]
        assert out.shape == (len(owners), runner.vocab_size) and out.dtype == torch.float32
        logits.update({owner: out[n].clone() for n, owner in enumerate(owners)})
    return logits


def texts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in lengths]


def assert_own_logits(model: torch.nn.Module, runner: ModelRunner, tolerance: float) -> None:
    texts = texts_of((120, 7, 64, 33, 1))
    with torch.no_grad():
        want = [model(torch.tensor([t]), use_cache=False).logits[0].float() for t in texts]
    logits = {**random_steps(runner, texts, 1), **random_steps(runner, texts, 2)}
    assert len(logits) > 50
    for (i, position), got in logits.items():
        scale = want[i][position].abs().max()
        assert float((got - want[i][position]).abs().max() / scale) < tolerance


def test_float32_equals_the_model() -> None:
    model = tiny_llama()
    runner = native_or_skip(model, num_blocks=24)
    assert runner.self_check_error is not None and runner.self_check_error < 1e-4
    assert isinstance(runner, ModelRunner)
    assert_own_logits(model, runner, 1e-5)
    runner.close()


def test_bfloat16_is_near_the_model() -> None:
    model = tiny_llama().to(torch.bfloat16)
    runner = native_or_skip(model, kv_cache_memory=2 << 20)
    assert_own_logits(model.float(), runner, 0.1)


def test_many_rows_take_the_other_path() -> None:
    model = tiny_llama()
    runner = native_or_skip(model, num_blocks=40)
    texts = texts_of((9,) * 20)
    plan = StepPlan(tuple(Row(i, 0, tuple(t[:8]), (i,), 0) for i, t in enumerate(texts)))
    assert runner.execute(plan).shape == (0, VOCAB)
    out = runner.execute(StepPlan(tuple(Row(i, 8, (t[8],), (i,), 1) for i, t in enumerate(texts))))
    for i, text in enumerate(texts):
        with torch.no_grad():
            want = model(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(out[i], want, atol=1e-4, rtol=1e-4)


def test_rows_without_logits_between_rows_with() -> None:
    model = tiny_llama()
    runner = native_or_skip(model, num_blocks=8)
    plan = StepPlan((Row(0, 0, (5,), (2,), 0), Row(1, 0, (9,), (1,), 1), Row(2, 0, (7,), (3,), 0)))
    with torch.no_grad():
        want = model(torch.tensor([[9]])).logits[0, -1]
    torch.testing.assert_close(runner.execute(plan)[0], want, atol=1e-4, rtol=1e-4)


def test_faults_are_named() -> None:
    model = tiny_llama()
    with pytest.raises(UsageError, match="multiple of 32"):
        native_or_skip(model, block_size=16, num_blocks=4)
    for size in (100, "100 B"):
        with pytest.raises(RunError, match="holds no block"):
            native_or_skip(model, kv_cache_memory=size)
    runner = native_or_skip(model, num_blocks=4)
    with pytest.raises(RunError, match="malformed row"):
        runner.execute(StepPlan((Row(7, 40, (1,), (0,), 1),)))
    with pytest.raises(RunError, match="block 4"):
        runner.execute(StepPlan((Row(7, 0, (1,), (4,), 1),)))
    runner.close()
    runner.close()
    with pytest.raises(RunError, match="closed"):
        runner.execute(StepPlan((Row(0, 0, (1,), (0,), 1),)))


def test_auto_states_what_it_passed_over() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    runner: Any = build_runner(GPT2LMHeadModel(config).eval(), num_blocks=8)
    assert type(runner).__name__ == "EagerRunner" and "native one was refused" in runner.notes[0]
    runner.close()
    model = tiny_llama()
    asked: Any = build_runner(model, attention="torch", num_blocks=24)
    assert type(asked).__name__ == "EagerRunner" and "asked for" in asked.notes[0]
    assert_own_logits_of_eager(model, asked)
    with pytest.raises(UsageError, match="no option"):
        build_runner(model, "eager", num_block=3)
    with pytest.raises(UsageError, match="'much' is not a size"):
        build_runner(model, "eager", kv_cache_memory="much")
    with pytest.raises(UsageError, match="unknown runner"):
        build_runner(model, "fast")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_knows_the_options_of_what_it_builds_on(kind: str) -> None:
    common = {"block_size", "num_blocks", "kv_cache_memory", "max_model_len", "max_num_seqs", "kv_dtype"}
    assert common <= options_of(kind)
    assert ("attention" in options_of(kind)) == (kind != "native")
    assert "model" not in options_of(kind) and "options" not in options_of(kind)


def assert_own_logits_of_eager(model: torch.nn.Module, runner: ModelRunner) -> None:
    texts = texts_of((70, 40))
    logits = random_steps(runner, texts, 4)
    runner.close()
    for i, text in enumerate(texts):
        with torch.no_grad():
            want = model(torch.tensor([text]), use_cache=False).logits[0]
        for (owner, position), got in logits.items():
            if owner == i:
                torch.testing.assert_close(got, want[position], atol=1e-4, rtol=1e-4)


def test_compiled_attention_backend_in_the_eager_runner() -> None:
    model = tiny_llama()
    try:
        runner = build_runner(model, "eager", attention="compiled", num_blocks=24)
    except RunError as error:
        pytest.skip(str(error))
    assert runner.block_size == 32
    assert_own_logits_of_eager(model, runner)


def test_a_bfloat16_model_without_its_own_roundings_comes_nearer_to_float32() -> None:
    """`rounding="none"` is what the runner hands to the decoder: float32 from the embedding to the logits."""
    ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    model = tiny_llama().to(torch.bfloat16)
    with torch.inference_mode():
        truth = tiny_llama().to(torch.bfloat16).float()(ids).logits[0]
    errors = {}
    for rounding in ("model", "none"):
        runner = native_or_skip(model, rounding=rounding, kv_dtype=torch.float32, num_blocks=4)
        logits = random_steps(runner, [ids[0].tolist()], seed=1)
        errors[rounding] = sum(float((row - truth[at]).abs().mean()) for (_, at), row in logits.items())
        runner.close()
    assert errors["none"] < 0.9 * errors["model"], errors
