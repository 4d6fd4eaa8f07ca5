"""The sliding KV cache against a plain float model with the same mask: runners, the engine, the pass, `llmopt.load`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.attention.layer import visible
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.runner_select import build_runner
from llmopt.runtime.engine.runner_sliding import UnsupportedSliding, reach
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig
from llmopt.runtime.engine.sliding import Sliding
from llmopt.runtime.kernels.build import unavailable_reason

VOCAB = 97
SINKS, WINDOW = 3, 21


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(kind: str = "llama", **changes: Any) -> torch.nn.Module:
    import transformers

    torch.manual_seed(1)
    settings = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4,
        "head_dim": 8,
    }  # fmt: skip
    name = {"llama": "Llama", "gemma3": "Gemma3", "mistral": "Mistral"}[kind]
    suffix = "TextConfig" if kind == "gemma3" else "Config"
    config = getattr(transformers, name + suffix)(**{**settings, **changes})
    return getattr(transformers, name + "ForCausalLM")(config).eval()


def masked_logits(model: torch.nn.Module, ids: list[int], sliding: Sliding, own: list[int] | None = None):
    """transformers' own modules in float32 with an additive mask a layer: what the cache is defined to give.

    own: each layer's own window, 0 for none. Returns [tokens, vocab].
    """
    at, count = torch.arange(len(ids)), model.config.num_hidden_layers
    masks = []
    for window in own or [0] * count:
        window, sinks = reach(window, sliding)
        seen = visible(at, at, window, 0, sinks)
        masks.append(torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None])
    hooks = []
    for layer, mask in zip(model.model.layers, masks):

        def put(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def greedy(model: torch.nn.Module, prompt: list[int], count: int, sliding: Sliding) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(masked_logits(model, tokens, sliding)[-1].argmax()))
    return tokens[len(prompt) :]


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


RUNNERS: dict[str, dict[str, Any]] = {
    "native": {"kind": "native"},
    "compiled": {"kind": "eager", "attention": "compiled"},
    "torch": {"kind": "eager", "attention": "torch", "block_size": 8},
    "reference": {"kind": "eager", "attention": "reference", "block_size": 8},
    "invariant": {"kind": "eager", "attention": "torch", "block_size": 8, "batch_invariant": True},
}


def runner_of(name: str, model: torch.nn.Module, **more: Any):
    if name in ("native", "compiled") and unavailable_reason():
        pytest.skip(unavailable_reason())
    return build_runner(model, **{**RUNNERS[name], "kv_sinks": SINKS, "kv_window": WINDOW, "num_blocks": 24, **more})


def scheduled_logits(runner, ids: list[int], seed: int) -> torch.Tensor:
    """Through the engine's own tables, in chunks of random length, beside another request; blocks that were given back
    are filled with large numbers by then: [tokens, vocab]."""
    from llmopt.runtime.engine.scheduler_select import make_scheduler

    rng = random.Random(seed)
    scheduler = make_scheduler(SchedulerConfig(max_num_seqs=4), runner)
    tables: list[Any] = [scheduler.new_table(), scheduler.new_table()]
    other, done, parts = text(200, 9), [0, 0], []
    while done[0] < len(ids):
        rows = []
        for i, tokens in enumerate((ids, other)):
            count = min(rng.choice([1, 1, 2, 7, 33]), len(tokens) - done[i])
            if runner.tail_blocks and done[i] % runner.block_size:  # a row that begins inside a block ends in it
                count = min(count, runner.block_size - done[i] % runner.block_size)
            if count:
                tables[i].grow(tables[i].missing(done[i] + count))
                blocks = tables[i].as_tuple()
                rows.append((i, Row(i, done[i], tuple(tokens[done[i] : done[i] + count]), blocks, count)))
        rng.shuffle(rows)
        out = runner.execute(StepPlan(tuple(row for _, row in rows))).clone()
        for (i, row), part in zip(rows, out.split([row.num_logits for _, row in rows])):
            if i == 0:
                parts.append(part)
            done[i] = row.end
            tables[i].slide(row.end)
        poison(runner, set(scheduler.pool.free))
    most = runner.sliding.most_blocks(runner.block_size)
    assert tables[0].num_held - runner.tail_blocks <= most < -(-len(ids) // runner.block_size)
    return torch.cat(parts)


def poison(runner, blocks: set[int]) -> None:
    """Large numbers where nothing may be read."""
    pools = runner.decoder.kv_cache if hasattr(runner, "decoder") else runner.pool.tensors
    for pool in pools:
        if pool.dtype.is_floating_point and pool.dtype.itemsize > 1:
            pool[:, sorted(blocks)] = 1e4
        else:
            pool.view(torch.uint8)[:, sorted(blocks)] = 255


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert float((got - want).norm() / want.norm()) < tolerance


@pytest.mark.parametrize("name", list(RUNNERS))
def test_logits_are_those_of_the_masked_model(name):
    """In prefill, chunked prefill and decode, of a request ten windows long that keeps a few blocks."""
    model, ids = model_of(), text(190)
    runner = runner_of(name, model)
    got = scheduled_logits(runner, ids, 1)
    again = scheduled_logits(runner, ids, 2)
    runner.close()
    want = masked_logits(model, ids, Sliding(SINKS, WINDOW))
    assert_near(got, want, 1e-4)
    assert_near(again, want, 1e-4)
    plain = masked_logits(model, ids, Sliding(0, 512))
    assert_near(got[:WINDOW], plain[:WINDOW], 1e-4)
    assert float((got - plain).norm() / plain.norm()) > 0.05  # the mask is seen


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("own", [9, 60])
def test_layers_with_a_window_of_their_own(name, own):
    """The smaller of both; a shorter one is the model's, and the model has no sinks there."""
    model = model_of("gemma3", sliding_window=own, query_pre_attn_scalar=8)
    windows = [own if kind == "sliding_attention" else 0 for kind in model.config.layer_types]
    model.model.layers[1].self_attn.layer_type = model.config.layer_types[1]
    ids = text(120)
    runner = runner_of(name, model)
    got = scheduled_logits(runner, ids, 3)
    runner.close()
    assert_near(got, masked_logits(model, ids, Sliding(SINKS, WINDOW), windows), 1e-4)


def test_reach():
    assert reach(0, Sliding(4, 30)) == (30, 4) and reach(50, Sliding(4, 30)) == (30, 4)
    assert reach(30, Sliding(4, 30)) == (30, 0) and reach(8, Sliding(4, 30)) == (8, 0)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "int4"])
def test_quantized_rows_have_the_same_bits_in_every_schedule(dtype):
    if unavailable_reason():
        pytest.skip(unavailable_reason())
    model, ids = model_of(), text(150)
    runner = runner_of("native", model, kv_dtype=dtype)
    first, second = (scheduled_logits(runner, ids, seed) for seed in (1, 2))
    runner.close()
    assert torch.equal(first, second)
    error = float((first - masked_logits(model, ids, Sliding(SINKS, WINDOW))).norm() / first.norm())
    assert 1e-4 < error < {"int8": 0.1, "fp8_e4m3": 0.2, "int4": 0.6}[dtype]


# -- the engine


def answers(engine: Engine, prompts: list[list[int]], count: int) -> dict[str, list[int]]:
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_new_tokens=count), request_id=str(i))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return {name: done.token_ids for (name, _), done in join_outputs(outputs).items()}


@pytest.mark.parametrize("name", ["native", "torch"])
def test_texts_under_preemption_shared_prefixes_and_drafts(name):
    """A pool that holds little more than one request: all texts are those of the masked model alone."""
    model, sliding = model_of(), Sliding(SINKS, WINDOW)
    runner = runner_of(name, model, num_blocks=3 if name == "native" else 9)

    class Guesser:
        def propose(self, requests):
            known = [wanted[tuple(r.token_ids[: r.num_prompt_tokens])][r.num_output_tokens :] for r in requests]
            return [[*tokens[:2], 1] for tokens in known]

        def observe(self, request, num_drafts, num_accepted): ...

        def forget(self, request): ...

    shared = text(70, 5)
    starts = [text(20, 6), text(25, 7), text(15, 8)]  # so short that all are admitted, and grow
    prompts = [*starts, [*shared, 1], [*shared, 2, 3], text(40, 9), shared[:50], [*shared, 1]]
    wanted = {tuple(p): greedy(model, p, 14, sliding) for p in prompts}
    for drafter in (None, Guesser()):
        engine = Engine(runner, scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16), drafter=drafter)
        found = answers(engine, prompts, 14)
        assert found == {str(i): wanted[tuple(p)] for i, p in enumerate(prompts)}
        metrics = engine.metrics()
        assert metrics.num_preemptions_total > 0 and engine.scheduler.pool.num_free == runner.num_blocks
        if drafter is not None:
            assert metrics.spec_decode_num_accepted_tokens_total > 20
    engine = Engine(runner, scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16))
    assert answers(engine, prompts, 14) == found
    assert engine.metrics().prefix_cache_hits_total > 0
    runner.close()


def test_a_draft_model_that_is_behind_the_window_does_not_draft():
    """What it would have to compute first is gone from the block tables."""
    from llmopt.runtime.engine.blocks import BlockPool
    from llmopt.runtime.engine.draft_model import SecondModel
    from llmopt.runtime.engine.fake_runner import FakeRunner
    from llmopt.runtime.engine.request import Request
    from llmopt.runtime.engine.sliding import SlidingTable

    request = Request(0, list(range(1, 31)))
    request.table = SlidingTable(BlockPool(20, 4), Sliding(2, 6))
    request.table.grow(8)
    drafts = SecondModel(FakeRunner(), 64, 100)
    assert drafts.limit(request) > 0
    request.table.slide(29)
    assert request.table.readable_from == 24 and drafts.limit(request) == 0
    drafts._progress[0].valid = 28
    assert drafts.limit(request) > 0


def test_a_request_longer_than_the_pool_runs_in_a_fixed_number_of_blocks():
    model, sliding = model_of(), Sliding(SINKS, WINDOW)
    most = sliding.most_blocks(8)
    runner = build_runner(
        model, "eager", attention="torch", block_size=8, kv_sinks=SINKS, kv_window=WINDOW, num_blocks=most
    )
    engine = Engine(runner, scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32))
    prompt = text(60, 4)
    assert answers(engine, [prompt], 20)["0"] == greedy(model, prompt, 20, sliding)
    assert len(prompt) + 20 > runner.num_blocks * runner.block_size
    with pytest.raises(UsageError, match="the model's context of 512"):
        engine.add_request(prompt, SamplingParams(max_new_tokens=453))
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_new_tokens=None), request_id="long")
    done = join_outputs([o for _ in range(1000) if engine.has_work for o in engine.step()])["long", 0]
    assert done.finish_reason == "length" and len(done.token_ids) == 512 - len(prompt)
    engine.close()


@pytest.fixture(scope="module")
def info(tiny_model):
    from llmopt.optimizer.sources import describe, resolve

    return describe(resolve(tiny_model))


def test_the_pass_plans_it(info):
    from llmopt.passes.kv_cache import KVCache

    plan = KVCache(kind="sliding", sinks=4, window=28, dtype="int8", block_size=32).plan(info)
    assert plan.refusals == [] and plan.summary == "sliding (4 sinks, window 28) KV cache, dtype int8"
    assert plan.runtime["kv_cache"]["sinks"] == 4 and plan.runtime["kv_cache"]["window"] == 28
    assert any("32 tokens a request" in note for note in plan.notes)
    for options, words in [({"kind": "sliding"}, "needs `window`"), ({"offload_gib": 2}, "kind: offloaded")]:
        with pytest.raises(UsageError, match=words):
            KVCache(**options)


def test_an_artifact_is_made_proved_and_loaded(tiny_model, tmp_path):
    import llmopt
    from llmopt.tests.runs import run

    made = run(tiny_model, [{"kv_cache": {"kind": "sliding", "sinks": 2, "window": 6}}], tmp_path / "out")
    figures = made.manifest.measured["divergence"]
    assert figures["mean_kl"] > 1e-3 and figures["cached_mean_kl"] > 1e-3  # the mask is seen in both: 1e-6 without
    wanted = "sliding, the first 2 and the last 6 tokens, as the RuntimeSpec asks"
    assert any(wanted in note["message"] for note in made.manifest.certificate["notes"])
    with llmopt.load(made.path) as llm:
        assert llm.runner.sliding == Sliding(2, 6)
        short = llm.generate("Once upon a time there was a river", max_new_tokens=12, logprobs=1).logprobs
    with llmopt.load(made.path, kv_window=500) as llm:
        assert llm.runner.sliding == Sliding(0, 500)
        assert any("kv_window as given to load" in note["message"] for note in llm.notes)
        assert llm.generate("Once upon a time there was a river", max_new_tokens=12, logprobs=1).logprobs != short
    with llmopt.load(made.path, engine="static") as llm:
        (note,) = [n for n in llm.notes if n["kind"] == "fallback" and "sliding" in n["message"]]
        assert "was not applied: the static engine" in note["message"]


def test_settings_given_and_what_became_of_them():
    from llmopt.optimizer.runtime_spec import KVCacheSpec
    from llmopt.runtime.kv_settings import changes_logits, drop_refused, kv_notes, kv_options, require_applied

    spec = KVCacheSpec(kind="sliding", sinks=4, window=60)
    assert kv_options(spec, {}) == {"kv_sinks": 4, "kv_window": 60}
    assert kv_options(spec, {"kv_window": 9}) == {"kv_window": 9}

    class Runner:
        sliding = Sliding(4, 60)

    assert [n["kind"] for n in kv_notes(spec, Runner(), {})] == ["note"] and changes_logits(Runner())
    require_applied(spec, Runner(), "here")
    with pytest.raises(RunError, match="did not apply the KV cache of kind sliding"):
        require_applied(spec, None, "here")
    options = kv_options(spec, {"block_size": 32})
    assert drop_refused(UnsupportedSliding("no"), options, {}) == "kv_window" and options == {"block_size": 32}
    (note,) = kv_notes(spec, None, {}, "", "latent attention")
    assert note["kind"] == "fallback" and "not applied: latent attention" in note["message"]
    with pytest.raises(UnsupportedSliding):
        drop_refused(UnsupportedSliding("no"), kv_options(spec, {"kv_window": 9}), {"kv_window": 9})


def test_impossible_settings_are_one_clear_error():
    model = model_of()
    for options, message in [({"kv_sinks": 2}, "without kv_window"), ({"kv_window": 0}, "kv_window=0")]:
        with pytest.raises(UsageError, match=message):
            build_runner(model, "eager", attention="torch", num_blocks=8, **options)


def test_latent_attention_is_refused():
    from dataclasses import replace

    from llmopt.runtime.attention.layer import AttentionLayer
    from llmopt.runtime.engine.runner_sliding import sliding_layers

    layer = AttentionLayer(0, 4, 4, 8, 8)
    assert sliding_layers([layer], Sliding(1, 5))[0].sink_tokens == 1
    with pytest.raises(UnsupportedSliding, match="latent attention") as caught:
        sliding_layers([replace(layer, kind="gather")], Sliding(1, 5))
    assert isinstance(caught.value, RunError)
