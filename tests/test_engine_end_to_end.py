"""The engine over a real transformers model: greedy text equals `generate`, one prompt at a time, in float32.

Prompts of very different lengths arrive in random order and at random steps, some are aborted, memory is too small for
all, half of the prompts share beginnings. The suite runs this on a tiny random model and, where the package with the
real one is installed, on a few prompts of SmolLM2; marked `slow` are its 64 prompts of 1 to 900 tokens.
"""

import os
import random
from pathlib import Path

import pytest
import torch
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Many small operations, maybe on a busy machine: threads that wait for each other cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_prompts(rng, count, longest, vocab_size, text_ids):
    """Random lengths, the shortest and the longest among them; slices of a text, some with shared beginnings."""
    lengths = [1, longest, *(rng.randrange(1, longest + 1) for _ in range(count - 2))]
    prompts = []
    for i, length in enumerate(lengths):
        start = 0 if i % 2 else rng.randrange(max(1, len(text_ids) - longest))
        prompt = text_ids[start : start + length]
        prompts.append([*prompt[:-1], rng.randrange(3, vocab_size)] if i % 4 == 1 else prompt)
    rng.shuffle(prompts)
    return prompts


def generate_alone(model, prompt, new_tokens):
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        done = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
    return done[0, len(prompt) :].tolist()


def run_together(model, tokenizer, prompts, new_tokens, rng, aborted, **limits):
    """Random arrivals and aborts; the completions by prompt number, and the engine's final metrics."""
    from llmopt.runtime.engine.runner import EagerRunner

    config = model.generation_config
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    scheduler = SchedulerConfig(max_num_seqs=limits.pop("max_num_seqs"), max_num_batched_tokens=limits.pop("budget"))
    runner = EagerRunner(model, max_num_seqs=scheduler.max_num_seqs, max_num_batched_tokens=64, **limits)
    engine = Engine(runner, tokenizer, scheduler=scheduler, eos_token_ids=eos)
    waiting, outputs, steps = list(range(len(prompts))), [], 0
    try:
        while waiting or engine.has_work:
            for _ in range(rng.choice([0, 0, 1, 4])):
                if waiting:
                    number = waiting.pop(rng.randrange(len(waiting)))
                    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens)
                    engine.add_request(prompts[number], params, request_id=str(number), priority=rng.randrange(2))
                    if number in aborted:
                        aborted[number] = steps + rng.randrange(1, new_tokens)
            for number, when in aborted.items():
                if when == steps:
                    engine.abort(str(number))
            outputs += engine.step()
            steps += 1
        assert engine.scheduler.pool.num_free == runner.num_blocks
        metrics = engine.metrics()
    finally:
        engine.close()
    assert sum(o.finished for o in outputs) == len(prompts)
    return {int(name): done for (name, _), done in join_outputs(outputs).items()}, metrics


def compare(model, tokenizer, prompts, new_tokens, seed, num_aborted, **limits):
    rng = random.Random(seed)
    expected = [generate_alone(model, prompt, new_tokens) for prompt in prompts]
    aborted = dict.fromkeys(rng.sample(range(len(prompts)), num_aborted), -1)
    results, metrics = run_together(model, tokenizer, prompts, new_tokens, rng, aborted, **limits)
    for number, wanted in enumerate(expected):
        done = results[number]
        if done.finish_reason == "abort":
            assert number in aborted
            assert done.token_ids == wanted[: len(done.token_ids)]
            continue
        assert done.token_ids == wanted, f"prompt {number} of {len(prompts[number])} tokens"
        assert done.error is None and done.finish_reason in ("stop", "length")
        assert done.text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert any(done.finish_reason == "abort" for done in results.values()) or not num_aborted
    # generate has the model's own attention again, and still says the same
    assert generate_alone(model, prompts[0], 4) == expected[0][:4]
    return metrics


def load(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def text_ids(tokenizer):
    from importlib.resources import files

    text = files("llmopt.data").joinpath("calibration.txt").read_text(encoding="utf-8")
    return tokenizer.encode(text[:20_000], add_special_tokens=False)


@pytest.mark.parametrize("num_blocks", [24, 200])
def test_tiny_model(make_model, num_blocks):
    model, tokenizer = load(make_model(dtype="float32", initializer_range=0.2, max_position_embeddings=256))
    rng = random.Random(num_blocks)
    prompts = make_prompts(rng, 16, 120, 400, text_ids(tokenizer))
    metrics = compare(
        model,
        tokenizer,
        prompts,
        12,
        seed=3,
        num_aborted=3,
        budget=48,
        max_num_seqs=8,
        block_size=16,
        num_blocks=num_blocks,
    )
    assert metrics.prefix_cache_hits_total > 0
    assert (metrics.num_preemptions_total > 0) == (num_blocks == 24)


def test_smollm2_few(smollm2):
    model, tokenizer = load(smollm2)
    prompts = make_prompts(random.Random(0), 4, 40, 49152, text_ids(tokenizer))
    compare(
        model, tokenizer, prompts, 5, seed=1, num_aborted=1, budget=64, max_num_seqs=4, block_size=16, num_blocks=64
    )


@pytest.fixture
def gemma() -> Path:
    """A folder with Gemma-3-270M (sliding-window layers, 262,144 tokens), named by $LLMOPT_TEST_GEMMA."""
    folder = os.environ.get("LLMOPT_TEST_GEMMA")
    if not folder:
        pytest.skip("LLMOPT_TEST_GEMMA names no folder with Gemma-3-270M")
    return Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "vocabulary"), [("smollm2", 49152), ("gemma", 262144)])
def test_64_prompts_of_1_to_900_tokens(request, name, vocabulary):
    model, tokenizer = load(request.getfixturevalue(name))
    prompts = make_prompts(random.Random(0), 64, 900, vocabulary, text_ids(tokenizer))
    metrics = compare(
        model,
        tokenizer,
        prompts,
        24,
        seed=2,
        num_aborted=10,
        budget=512,
        max_num_seqs=16,
        block_size=16,
        num_blocks=300,
    )
    assert metrics.num_preemptions_total > 0 and metrics.prefix_cache_hits_total > 0
