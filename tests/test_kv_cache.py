"""Quantized KV caches in use: the pass, `llmopt.load`, the proof, and texts that do not depend on company."""

from __future__ import annotations

import random
from typing import Any

import llmopt
import pytest
import torch
from llmopt.evaluation.cached import cached_logits
from llmopt.optimizer.errors import GateError, RunError, UsageError
from llmopt.optimizer.gates import judge
from llmopt.optimizer.model import ModelInfo
from llmopt.optimizer.recipe import Gates
from llmopt.optimizer.runtime_spec import KVCacheSpec
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.kv_cache import KVCache, bytes_per_token, quantized_bytes_per_token
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.runner_select import build_runner
from llmopt.runtime.kernels.build import unavailable_reason
from llmopt.runtime.kernels.kv_format import FORMATS
from llmopt.runtime.kv_settings import kv_notes, kv_options, require_applied
from llmopt.tests.runs import run

NAMES = list(FORMATS)
LONG = "The capital of France is a town, and so is the capital of Spain; " * 2
PROMPTS = ["The capital of", "Once upon a time there was", LONG + "water", LONG + "a river"]
needs_native = pytest.mark.skipif(bool(unavailable_reason()), reason="the native kernels do not compile here")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def info(tiny_model) -> ModelInfo:
    return describe(resolve(tiny_model))


def llama(seed: int = 0, **changes: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


# -- the pass


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_states_bytes_a_token(info, name):
    plan = KVCache(dtype=name).plan(info)
    assert plan.refusals == [] and plan.runtime["kv_cache"]["dtype"] == name
    per_token = quantized_bytes_per_token(info.config, name)
    layer_heads = 2 * 2
    assert per_token == layer_heads * {"int8": 2 * 18, "fp8_e4m3": 2 * 18, "int4": 10 + 8 + 2}[name]  # 1.5 for scales
    (note,) = plan.notes
    assert f"{per_token:,} bytes a token in {name}" in note and f"{bytes_per_token(info.config, 2):,} in" in note


def test_only_a_paged_cache_is_quantized(info):
    (refusal,) = KVCache(kind="dynamic", dtype="int8").plan(info).refusals
    assert "int8 needs kind: paged" in refusal
    with pytest.raises(UsageError, match=r"kv_cache\.dtype"):
        KVCache(dtype="int3")


# -- the spec, as load applies it


def test_given_beats_the_spec_and_notes_say_what_became_of_it():
    spec = KVCacheSpec(kind="paged", dtype="int8")

    class Runner:
        kv_dtype = "int8"

    assert kv_options(spec, {"block_size": 32}) == {"kv_dtype": "int8", "block_size": 32}
    assert kv_options(spec, {"kv_dtype": "int4"}) == {"kv_dtype": "int4"}
    assert kv_options(KVCacheSpec(), {}) == {} and kv_notes(KVCacheSpec(), Runner(), {}) == []
    assert [n["kind"] for n in kv_notes(spec, Runner(), {})] == ["note"]
    Runner.kv_dtype = "bfloat16"
    assert "as given to load" in kv_notes(spec, Runner(), {"kv_dtype": "bfloat16"})[0]["message"]
    (note,) = kv_notes(spec, Runner(), {}, "it cannot")
    assert note["kind"] == "fallback" and "not applied: it cannot" in note["message"]
    assert "the static engine" in kv_notes(spec, None, {})[0]["message"]


def test_unknown_dtype_is_one_clear_error(tiny_model):
    with pytest.raises(UsageError, match="unknown kv_dtype 'int5'"):
        llmopt.load(tiny_model, kv_dtype="int5")


def test_an_artifact_is_proved_by_reading_its_cache(tiny_model, tmp_path, name="int8"):
    made = run(tiny_model, [{"kv_cache": {"dtype": name}}], tmp_path / "out")
    measured = made.manifest.measured["divergence"]
    assert 0 < measured["cached_mean_kl"] < 0.5 and 0 < measured["cached_top1_agreement"] <= 1
    assert "cached_perplexity_increase" in measured
    assert made.manifest.certificate["kv_cache"] == name
    assert any(f"{name}, as the RuntimeSpec asks" in n["message"] for n in made.manifest.certificate["notes"])
    with llmopt.load(made.path) as llm:
        assert llm.runner.kv_dtype == name
    with llmopt.load(made.path, kv_dtype="auto") as llm:
        assert llm.runner.kv_dtype == "bfloat16"
        assert any("as given to load" in note["message"] for note in llm.notes)
    with llmopt.load(made.path, engine="static") as llm:
        (note,) = [n for n in llm.notes if n["kind"] == "fallback" and "KV cache: " + name in n["message"]]
        assert "was not applied" in note["message"]


def test_a_proof_by_an_engine_without_the_cache_is_refused():
    with pytest.raises(RunError, match="did not apply the KV cache int8"):
        require_applied(KVCacheSpec(kind="paged", dtype="int8"), None, "here")
    require_applied(KVCacheSpec(kind="paged"), None, "here")


def test_gates_judge_the_worse_of_the_two_figures():
    figures = {"mean_kl": 0.01, "cached_mean_kl": 0.2, "top1_agreement": 0.99, "cached_top1_agreement": 0.5}
    records = judge(Gates(max_mean_kl=0.1, min_top1_agreement=0.9), {"divergence": figures})
    assert [(r.value, r.passed) for r in records] == [(0.2, False), (0.5, False)]
    figures.update(cached_mean_kl=0.001, cached_top1_agreement=1.0)
    records = judge(Gates(max_mean_kl=0.1, min_top1_agreement=0.9), {"divergence": figures})
    assert [(r.value, r.passed) for r in records] == [(0.01, True), (0.99, True)]


def test_a_cache_that_is_too_coarse_fails_its_gate(tiny_model, tmp_path):
    with pytest.raises(GateError, match="max_mean_kl"):
        run(tiny_model, [{"kv_cache": {"dtype": "int4"}}], tmp_path / "out", gates={"max_mean_kl": 1e-9})


# -- schedules


def random_schedule(runner, texts: list[list[int]], seed: int) -> list[torch.Tensor]:
    """Every text in chunks of random length, some single tokens, in random company and blocks; the logits of each."""
    rng = random.Random(seed)
    free = list(range(runner.num_blocks))
    rng.shuffle(free)
    tables: list[list[int]] = [[] for _ in texts]
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(d < len(t) for d, t in zip(done, texts)):
        running = [i for i, text in enumerate(texts) if done[i] < len(text)]
        rng.shuffle(running)
        rows = []
        for i in running[: rng.randint(1, len(running))]:
            count = min(rng.choice([1, 1, 3, 9, 40]), len(texts[i]) - done[i])
            inside, tail = done[i] % runner.block_size, runner.tail_blocks
            if tail and inside:
                count = min(count, runner.block_size - inside)
            while (len(tables[i]) - tail) * runner.block_size < done[i] + count:
                tables[i].append(free.pop())
            rows.append((i, Row(i, done[i], tuple(texts[i][done[i] : done[i] + count]), tuple(tables[i]), count)))
            done[i] += count
        out = runner.execute(StepPlan(tuple(row for _, row in rows))).clone()
        for (i, _), part in zip(rows, out.split([row.num_logits for _, row in rows])):
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def texts(lengths: list[int]) -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(0, 211, (n,), generator=g).tolist() for n in lengths]


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_native_logits_have_the_same_bits_in_every_schedule(name):
    runner = build_runner(llama(), "native", kv_dtype=name, num_blocks=24, max_model_len=128)
    sequences = texts([70, 5, 33, 50])
    alone = [random_schedule(runner, [text], seed)[0] for seed, text in enumerate(sequences)]
    together = random_schedule(runner, sequences, 11)
    for one, other in zip(alone, together):
        assert torch.equal(one, other)
    runner.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["native", "eager"])
def test_logits_are_near_those_of_the_plain_cache(name, kind):
    """And not equal to them: the codes are read."""
    if kind == "native" and unavailable_reason():
        pytest.skip(unavailable_reason())
    sequences, model = texts([60, 40]), llama()
    found = {}
    for dtype in ("auto", name):
        more = {} if kind == "native" else {"attention": "torch"}
        runner = build_runner(model, kind, kv_dtype=dtype, num_blocks=24, max_model_len=128, **more)
        found[dtype] = torch.cat(random_schedule(runner, sequences, 3))
        runner.close()
    error = float((found[name] - found["auto"]).norm() / found["auto"].norm())
    assert 1e-4 < error < {"int8": 0.05, "fp8_e4m3": 0.15, "int4": 0.5}[name]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_native_and_torch_backends_agree(name):
    if unavailable_reason():
        pytest.skip(unavailable_reason())
    model, sequences = llama(), texts([60, 40])
    found = []
    for attention in ("compiled", "torch"):
        options = {"kv_dtype": name, "num_blocks": 24, "block_size": 32, "max_model_len": 128}
        runner = build_runner(model, "eager", attention=attention, **options)
        assert runner.attention.name == attention and runner.kv_dtype == name
        found.append(torch.cat(random_schedule(runner, sequences, 3)))
        runner.close()
    # a code may fall otherwise where the first layer's rounding differs: a step of it, seldom
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.1


# -- the engine


@pytest.fixture(scope="module", params=["int8", "int4"])
def loaded(request, tiny_model):
    """A pool so small that requests are preempted when all run together."""
    tail = FORMATS[request.param].tail_blocks
    with llmopt.load(
        tiny_model, kv_dtype=request.param, num_blocks=7 + 2 * tail, max_num_seqs=8, max_num_batched_tokens=16
    ) as llm:
        yield llm


def test_texts_do_not_depend_on_neighbours_preemption_or_shared_prefixes(loaded):
    alone = [loaded.generate(prompt, max_new_tokens=40).token_ids for prompt in PROMPTS]
    again = [c.token_ids for c in loaded.generate(PROMPTS * 2, max_new_tokens=40)]
    assert again == alone * 2
    metrics = loaded._backend.engine.metrics()
    assert metrics.num_preemptions_total > 0 and metrics.prefix_cache_hits_total > 0


def test_forked_sequences_are_those_of_their_own_seeds(loaded):
    settings = {"max_new_tokens": 24, "temperature": 1.0, "seed": 4, "n": 2}
    first = [c.token_ids for c in loaded.generate(PROMPTS[1], **settings)]
    crowd = loaded.generate([PROMPTS[0], PROMPTS[1], PROMPTS[2]], **settings)
    assert [c.token_ids for c in crowd[1]] == first and first[0] != first[1]


def test_the_second_half_is_scored_against_the_cache():
    """Logits of the second half change with what the first half left in the cache, and only with that."""
    if unavailable_reason():
        pytest.skip(unavailable_reason())
    runner = build_runner(llama(), "native", kv_dtype="int8", num_blocks=8, max_model_len=128)
    windows = torch.tensor(texts([64, 64]))
    windows[1, 32:] = windows[0, 32:]
    found = [(ids, logits.clone()) for ids, logits in cached_logits(runner, windows, chunk=7)]
    (ids, logits), (_, other) = found
    assert ids.tolist() == windows[0, 31:].tolist() and logits.shape == (32, 211)
    whole = random_schedule(runner, [windows[0].tolist()], 0)[0]
    assert torch.equal(logits, whole[31:63])
    assert not torch.equal(logits, other)
    runner.close()
