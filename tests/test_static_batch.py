"""StaticBatch gives what transformers' generate gives, whatever the architecture, the batch and the drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from llmopt.optimizer.errors import UsageError
from llmopt.runtime.completion import collect
from llmopt.runtime.drafting import ModelDrafter, NgramDrafter
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.static_batch import StaticBatch
from transformers import AutoTokenizer, GenerationConfig

SMALL = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2},
    "GPT2": {"vocab_size": 400, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "OPT": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 128},
    "Bloom": {"vocab_size": 400, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": SMALL,
    "Mpt": {"vocab_size": 400, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "Gemma3": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8},
    "Mamba": {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "MiniMax": {
        **SMALL,
        "intermediate_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "block_size": 8,
    },
    "Rwkv": {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
}
"""Beside plain attention: alibi (bloom, mpt), no AttentionInterface (falcon …), a sliding window that is shorter than
the prompts, a recurrent state (mamba), a cache class of the architecture's own (minimax), and a model whose forward
takes no cache (rwkv)."""


def tiny(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    names = {"GPT2": "GPT2LMHeadModel"}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": False}
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(**ARCHITECTURES[name], **ids)
    model = getattr(transformers, names.get(name, f"{name}ForCausalLM"))(config).eval()
    for parameter in model.parameters():  # initial weights are so small that every text would be one token repeated
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def prompts(count: int = 6, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, longest, 7, 7, 12, 7, 3, 12][:count]
    return [torch.randint(2, 400, (length,), generator=generator).tolist() for length in lengths]


def run(batch: StaticBatch, ids: list[list[int]], params: SamplingParams | list[SamplingParams], draw=collect):
    each = params if isinstance(params, list) else [params] * len(ids)
    return [sequences[0] for sequences in draw(batch.stream(ids, each), ids, [1] * len(ids))]


def expected(model: Any, ids: list[int], count: int) -> list[int]:
    """transformers' own greedy continuation, one prompt at a time."""
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=1, pad_token_id=1, use_cache=True)
    tensor = torch.tensor([ids])
    return model.generate(tensor, attention_mask=torch.ones_like(tensor), generation_config=config)[0].tolist()[
        len(ids) :
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_is_that_of_generate(name, tokenizer):
    model = tiny(name)
    batch = StaticBatch(model, tokenizer, [1])
    ids = prompts()
    found = run(batch, ids, SamplingParams(temperature=0.0, max_new_tokens=16))
    for one, prompt in zip(found, ids):
        assert one.token_ids == expected(model, prompt, 16)
        assert one.finish_reason == ("stop" if one.token_ids[-1] == 1 else "length")
    assert any(len(set(one.token_ids)) > 3 for one in found)
    assert bool([n for n in batch.notes if n["kind"] == "fallback"]) == (name == "Rwkv")


def test_groups_run_together_in_float32_and_alone_in_half_precision(tokenizer):
    model = tiny("Llama")
    assert StaticBatch(model, tokenizer).max_batch > 1
    assert StaticBatch(model.to(torch.bfloat16), tokenizer).max_batch == 1
    assert StaticBatch(model, tokenizer, max_batch=4).max_batch == 4


def test_rows_of_a_group_end_apart(tokenizer):
    """Rows that finish early leave the batch, and the others go on undisturbed."""
    model = tiny("Llama")
    ids = [[5 + i, 60 + i, 9] for i in range(6)]
    params = [SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in (1, 9, 2, 5, 0, 9)]
    found = run(StaticBatch(model, tokenizer, [1]), ids, params)
    assert [one.num_tokens for one in found] == [1, 9, 2, 5, 0, 9]
    alone = StaticBatch(model, tokenizer, [1], max_batch=1)
    for one, prompt, own in zip(found, ids, params):
        assert one.token_ids == run(alone, [prompt], own)[0].token_ids
        assert one.finish_reason == "length"


def test_seeded_sampling_does_not_depend_on_neighbours(tokenizer):
    model = tiny("Llama")
    ids = [[5, 60, 9], [7, 8, 10], [3, 3, 3]]
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=s, max_new_tokens=12) for s in (1, 2, 3)]
    batch = StaticBatch(model, tokenizer, [1])
    together = run(batch, ids, params)
    for i in range(3):
        assert together[i].token_ids == run(batch, [ids[i]], params[i])[0].token_ids
    unseeded = SamplingParams(temperature=2.0, max_new_tokens=12)
    assert run(batch, ids[:1], unseeded)[0].token_ids != run(batch, ids[:1], unseeded)[0].token_ids


def test_stop_conditions(tokenizer):
    model = tiny("Llama")
    batch = StaticBatch(model, tokenizer, [1])
    plain = run(batch, [[5, 60, 9]], SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True))[0]
    token = next(t for t in plain.token_ids[2:] if t not in plain.token_ids[:2])
    cut = plain.token_ids.index(token) + 1
    stopped = run(batch, [[5, 60, 9]], SamplingParams(temperature=0.0, max_new_tokens=12, stop_token_ids=(token,)))[0]
    assert stopped.token_ids == plain.token_ids[:cut]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
    eos = run(StaticBatch(model, tokenizer, [token]), [[5, 60, 9]], SamplingParams(temperature=0.0, max_new_tokens=12))[
        0
    ]
    assert eos.token_ids == plain.token_ids[:cut]
    string = plain.text[3:5]
    at = run(batch, [[5, 60, 9]], SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True, stop=string))[0]
    assert at.text == plain.text[: plain.text.index(string)]
    assert (at.finish_reason, at.stop_reason) == ("stop", string)


def test_chunks_join_to_the_text(tokenizer):
    batch = StaticBatch(tiny("Llama"), tokenizer, [1])
    params = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    chunks = list(batch.stream([[5, 60, 9]], [params]))
    whole = run(batch, [[5, 60, 9]], params)[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text == tokenizer.decode(whole.token_ids)
    assert [bool(chunk.finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_logprobs_are_those_of_the_model(tokenizer):
    model = tiny("Llama")
    ids = [5, 60, 9, 11]
    params = SamplingParams(temperature=0.0, max_new_tokens=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    found = run(StaticBatch(model, tokenizer), [ids], params)[0]
    everything = ids + found.token_ids
    with torch.inference_mode():
        truth = model(torch.tensor([everything])).logits[0].log_softmax(-1)
    assert found.prompt_logprobs[0] is None
    for position in range(1, len(everything)):
        all_logprobs = found.prompt_logprobs + found.logprobs
        assert all_logprobs[position].logprob == pytest.approx(
            truth[position - 1, everything[position]].item(), abs=1e-4
        )
    best = truth[len(ids) - 1].topk(2)
    assert [token for token, _ in found.logprobs[0].top] == best.indices.tolist()


def repeating(model: Any) -> list[list[int]]:
    """Prompts that repeat themselves, so that n-grams have something to find."""
    return [[7, 8, 9, 10, 11, 7, 8, 9], [20, 21, 20, 21, 20, 21], [30], [5, 60, 9]]


DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "ngram": lambda model: NgramDrafter(3),
    "unigram": lambda model: NgramDrafter(1),
    "itself": lambda model: ModelDrafter(model, 400),
    "stranger": lambda model: ModelDrafter(tiny("Llama", seed=9), 400),
}


@pytest.mark.parametrize(
    ("name", "kind", "fixed"),
    [
        *(("Llama", kind, fixed) for kind in DRAFTERS for fixed in (None, 3)),
        *(("Gemma3", kind, 3) for kind in DRAFTERS),
        ("Falcon", "itself", None),
        ("GPT2", "ngram", None),
        ("Rwkv", "ngram", 3),
    ],
)
def test_drafts_change_no_token(name, kind, fixed, tokenizer):
    model = tiny(name)
    plain = StaticBatch(model, tokenizer, [1])
    drafting = StaticBatch(model, tokenizer, [1], drafter=DRAFTERS[kind](model), num_draft_tokens=fixed)
    for params in (
        SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, seed=5, max_new_tokens=20, repetition_penalty=1.1),
    ):
        for prompt in repeating(model):
            assert run(drafting, [prompt], params)[0].token_ids == run(plain, [prompt], params)[0].token_ids
        assert drafting.num_drafted > 0
        if kind == "itself" and params.greedy:
            assert drafting.num_accepted == drafting.num_drafted


def test_drafts_never_pass_the_limit(tokenizer):
    model = tiny("Llama")
    batch = StaticBatch(model, tokenizer, context_length=16, drafter=ModelDrafter(model, 400), num_draft_tokens=8)
    for count in (1, 2, 7, None):
        found = run(batch, [[5, 60, 9]], SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True))[0]
        assert found.num_tokens == (13 if count is None else count)


@pytest.mark.parametrize("name", ["Mamba", "MiniMax"])
def test_states_that_cannot_be_taken_back_turn_drafts_off(name, tokenizer):
    model = tiny(name)
    batch = StaticBatch(model, tokenizer, [1], drafter=NgramDrafter())
    (note,) = batch.notes
    assert note["kind"] == "fallback"
    assert "drafts are off" in note["message"]
    ids = repeating(model)
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    assert [o.token_ids for o in run(batch, ids, params)] == [expected(model, prompt, 12) for prompt in ids]


def test_abandoned_streams_leave_the_drafter_usable(tokenizer):
    model = tiny("Llama")
    batch = StaticBatch(model, tokenizer, [1], drafter=ModelDrafter(model, 400))
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    stream = batch.stream([[7, 8, 7, 8]], [params])
    next(stream)
    during = run(batch, [[7, 8, 7, 8]], params)[0].token_ids
    stream.close()
    assert run(batch, [[7, 8, 7, 8]], params)[0].token_ids == during
    assert batch.num_drafted > 0


def test_a_request_that_fails_says_so(tokenizer):
    model = tiny("Llama")
    model.lm_head.weight.data.fill_(float("nan"))
    chunks = list(StaticBatch(model, tokenizer).stream([[5, 6]], [SamplingParams(temperature=0.0)]))
    assert chunks[-1].finish_reason == "error"
    assert "not finite" in str(chunks[-1].error)


def test_structured_output_needs_the_engine(tokenizer):
    with pytest.raises(UsageError, match="needs the native engine"):
        list(StaticBatch(tiny("Llama"), tokenizer).stream([[5]], [SamplingParams(regex="a+")]))
