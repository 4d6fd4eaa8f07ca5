"""The user's handle: one prompt or many, streams, scores, errors before anything runs, the same behind both engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import llmopt
import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.completion import Completion
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.llm import LLM, load

ENGINES = ("static", "native")
PROMPTS = ["Hello", "The sky is blue, and so is the sea.", [{"role": "user", "content": "Hi"}], [5, 60, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 model, so that engines which order their sums differently agree on every token."""
    from safetensors.torch import load_file, save_file

    spec = Path(__file__).with_name("conftest.py")
    namespace: dict = {"__file__": str(spec), "__name__": "conftest_copy"}
    exec(compile(spec.read_text(encoding="utf-8"), str(spec), "exec"), namespace)
    path = namespace["save_tiny_model"](
        tmp_path_factory.mktemp("llm") / "model", dtype="float32", tie_word_embeddings=False
    )
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    noisy = {k: v + 0.2 * torch.randn(v.shape, generator=generator) for k, v in tensors.items()}
    save_file(noisy, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, folder: Path):
    with load(folder, engine=request.param) as opened:
        yield opened


def artifact(folder: Path, out: Path, runtime: dict) -> Path:
    shutil.copytree(folder, out)
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.iterdir()}
    (out / "llmopt.json").write_text(json.dumps({"files": files, "runtime": runtime}))
    return out


def test_public_names():
    assert llmopt.load is load
    assert llmopt.LLM is LLM
    assert llmopt.Completion is Completion


def test_one_prompt_gives_one_completion_and_a_list_gives_a_list(llm: LLM):
    one = llm.generate("Hello", max_new_tokens=5)
    assert isinstance(one, Completion)
    assert not one.text.startswith("Hello")
    assert one.prompt_token_ids == llm.tokenizer("Hello")["input_ids"]
    assert one.num_prompt_tokens == len(one.prompt_token_ids)
    many = llm.generate(PROMPTS, max_new_tokens=5)
    assert len(many) == len(PROMPTS)
    assert many[0] == one
    assert llm.generate([], max_new_tokens=5) == []
    assert llm.generate(["Hello"], max_new_tokens=5) == [one]


def test_both_engines_say_the_same(folder: Path):
    texts = []
    for engine in ENGINES:
        with load(folder, engine=engine) as llm:
            assert llm.backend == engine
            greedy = llm.generate(PROMPTS, max_new_tokens=20)
            sampled = llm.generate(PROMPTS, max_new_tokens=20, temperature=0.9, top_k=30, seed=4)
            texts.append([one.token_ids for one in greedy + sampled])
    assert texts[0] == texts[1]
    assert any(len(set(tokens)) > 4 for tokens in texts[0])


def test_stream_joins_to_generate(llm: LLM):
    whole = llm.generate("Hello", max_new_tokens=12, ignore_eos=True)
    chunks = list(llm.stream("Hello", max_new_tokens=12, ignore_eos=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 2
    assert [i for i, chunk in enumerate(chunks) if chunk.finish_reason] == [len(chunks) - 1]


def test_leaving_a_stream_early_leaves_the_model_usable(llm: LLM):
    stream: Any = llm.stream("Hello", max_new_tokens=200, ignore_eos=True)
    next(stream)
    stream.close()
    assert llm.generate("Hello", max_new_tokens=3).num_tokens <= 3


def test_params_for_all_or_one_each(llm: LLM):
    short, long = (SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in (2, 6))
    assert [one.num_tokens for one in llm.generate(["a", "b"], [short, long])] == [2, 6]
    assert llm.generate("a", long).num_tokens == 6
    with pytest.raises(UsageError, match="2 params for 1 prompts"):
        llm.generate("a", [short, long])
    with pytest.raises(UsageError, match="'n' is given beside params"):
        llm.generate("a", short, n=2)


def test_several_sequences_of_one_prompt(llm: LLM):
    found: Any = llm.generate(["a", "b"], n=3, temperature=1.5, seed=1, max_new_tokens=8)
    first, second = found
    assert [one.index for one in first] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in first}) > 1
    assert first[0].prompt_token_ids != second[0].prompt_token_ids


def test_score(llm: LLM):
    text = "The sky is blue."
    score = llm.score(text)
    with torch.inference_mode():
        # The engine puts its own attention into the module: a fresh one tells the truth.
        from llmopt.runtime.open import open_model

        logits = open_model(llm._opened.folder).module(torch.tensor([score.token_ids])).logits[0]
    truth = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(score.token_ids[1:])[:, None])[:, 0]
    assert score.logprobs[0] is None
    assert score.logprobs[1:] == pytest.approx(truth.tolist(), abs=1e-4)
    assert score.total == pytest.approx(truth.sum().item(), abs=1e-3)
    assert [one.token_ids for one in llm.score([text, [5]])] == [score.token_ids, [5]]
    assert llm.score([[5]])[0].logprobs == [None]


def test_agenerate_leaves_the_loop_free(llm: LLM):
    async def run():
        results = await asyncio.gather(*(llm.agenerate(p, max_new_tokens=6) for p in ("Hello", "a", "b")))
        return [one.token_ids for one in results]

    assert asyncio.run(run()) == [llm.generate(p, max_new_tokens=6).token_ids for p in ("Hello", "a", "b")]


def test_threads_may_share_one_model(llm: LLM):
    wanted = {p: llm.generate(p, max_new_tokens=8).token_ids for p in ("Hello", "a", "b", "cd")}
    found: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda p=p: found.update({p: llm.generate(p, max_new_tokens=8).token_ids}))
        for p in wanted
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ("a", {"max_new_tokens": 600}, "context is 512"),
        (["a", [3] * 512], {"max_new_tokens": 1}, "prompt 1: the prompt has 512 tokens"),
        ([[3, 400]], {}, "prompt 0: token id 400 is outside the vocabulary"),
        ("a", {"temprature": 1}, "Did you mean 'temperature'"),
        ("a", {"temperature": -1}, "temperature=-1"),
        ("a", {"stop_token_ids": [4000]}, "4000 is outside"),
        ({"role": "user"}, {}, "list of messages"),
        (7, {}, "int"),
    ],
)
def test_errors_come_before_anything_runs(llm: LLM, prompts, options, words):
    with pytest.raises(UsageError, match=words):
        llm.generate(prompts, **options)


def test_stream_refuses_a_list_at_the_call(llm: LLM):
    with pytest.raises(UsageError, match="one prompt"):
        llm.stream(["a", "b"])
    with pytest.raises(UsageError, match="context"):
        llm.stream("a", max_new_tokens=1000)


@pytest.mark.parametrize("engine", ENGINES)
def test_close_leaves_no_thread_and_refuses_more(folder: Path, engine: str):
    before = {thread for thread in threading.enumerate() if thread.name.startswith("llmopt")}
    with load(folder, engine=engine) as llm:
        llm.generate("a", max_new_tokens=2)
    llm.close()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("llmopt")} <= before
    with pytest.raises(RunError, match="closed"):
        llm.generate("a")


def test_auto_is_native_where_it_can_and_static_with_a_note_where_not(folder: Path, tmp_path: Path, tiny_model: Path):
    import transformers

    with load(folder) as llm:
        assert llm.backend == "native"
    config = transformers.BloomConfig(vocab_size=400, hidden_size=32, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path)
    with load(tmp_path) as llm:
        assert llm.backend == "static"
        (note,) = [n for n in llm.notes if n["kind"] == "fallback"]
        assert "static, not native" in note["message"]
        assert llm.generate("a", max_new_tokens=2).num_tokens <= 2
    with pytest.raises(RunError, match="cannot run BloomForCausalLM"):
        load(tmp_path, engine="native")


def test_a_backend_named_by_the_artifact_is_honoured(folder: Path, tmp_path: Path):
    out = artifact(folder, tmp_path / "a", {"attention": {"backend": "eager", "chosen": "eager"}})
    with load(out) as llm:
        assert llm.backend == "static"
        assert llm.module.config._attn_implementation == "eager"


def test_wrong_engine_and_options(folder: Path):
    with pytest.raises(UsageError, match="no engine 'fast'"):
        load(folder, engine="fast")
    with pytest.raises(UsageError, match=r"no option 'max_num_seq'.*'max_num_seqs'"):
        load(folder, engine="native", max_num_seq=2)
    with pytest.raises(UsageError, match="no option 'max_num_seqs'"):
        load(folder, engine="static", max_num_seqs=2)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_artifacts_drafts_run_and_change_nothing(folder: Path, tmp_path: Path, engine: str):
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    with load(folder, engine=engine) as llm:
        plain = llm.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids
    out = artifact(folder, tmp_path / "a", {"draft": {"kind": "model", "model": "draft", "num_tokens": 3}})
    shutil.copytree(folder, out / "draft")
    manifest = json.loads((out / "llmopt.json").read_text())
    weights = out / "draft" / "model.safetensors"
    manifest["files"]["draft/model.safetensors"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    (out / "llmopt.json").write_text(json.dumps(manifest))
    for draft in (True, False):
        with load(out, engine=engine, draft=draft) as llm:
            assert llm.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids == plain
            backend: Any = llm._backend
            if engine == "native":
                accepted = backend.engine.metrics().spec_decode_num_accepted_tokens_total
            else:
                accepted = backend.num_accepted
            assert (accepted > 0) == draft


@pytest.mark.parametrize("spec", [{"kind": "static"}, {"dtype": "int8"}])
def test_a_cache_that_does_not_exist_is_an_error(folder: Path, tmp_path: Path, spec: dict):
    out = artifact(folder, tmp_path / "a", {"kv_cache": spec})
    with pytest.raises(RunError, match="asks for a KV cache"):
        load(out)


def test_real_model_says_what_generate_says(smollm2: Path):
    from llmopt.runtime.open import open_model

    prompts = ["The capital of France is", "Water boils at"]
    with load(smollm2, engine="static") as llm:
        found = [one.token_ids for one in llm.generate(prompts, max_new_tokens=6)]
    model = open_model(smollm2).module
    for prompt, tokens in zip(prompts, found):
        ids = torch.tensor([llm.tokenizer(prompt)["input_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == tokens
