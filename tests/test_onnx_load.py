"""`llmopt.load` on an ONNX artifact: the same answers as torch in every way of asking, and clear errors."""

from __future__ import annotations

import json
import re
import shutil

import llmopt
import pytest
from llmopt.exporters.onnx import OnnxExporter
from llmopt.optimizer.export import export_artifact
from llmopt.optimizer.verify import verify
from llmopt.tests.onnx_models import export, save_family

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

PROMPTS = ["The sea", "Once upon a time there was", "a", "He said that the water"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_family("llama", tmp_path_factory.mktemp("load") / "llama")


@pytest.fixture(scope="module", params=["genai", "ort"])
def artifact(request, source, tmp_path_factory):
    """A whole artifact in the flavor genai, a folder without a manifest in the other."""
    out = tmp_path_factory.mktemp("artifact") / request.param
    if request.param == "genai":
        export_artifact(source, OnnxExporter(gate_tokens=4), out)
    else:
        export(source, out, flavor="ort", gate_tokens=4)
    return out


@pytest.fixture(scope="module")
def torch_llm(source):
    with llmopt.load(source, engine="static", dtype="float32", device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def graph(artifact):
    with llmopt.load(artifact) as llm:
        yield llm


SAMPLINGS = [
    {"max_new_tokens": 12, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7, "ignore_eos": True},
    {"max_new_tokens": 10, "temperature": 1.0, "seed": 3, "n": 2, "repetition_penalty": 1.2},
    {"max_new_tokens": 40, "stop": ["e", "o"], "ignore_eos": True},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_same_as_torch(sampling, graph, torch_llm):
    def facts(found):
        flat = [one for item in found for one in (item if isinstance(item, list) else [item])]
        return [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in flat]

    assert facts(graph.generate(PROMPTS, **sampling)) == facts(torch_llm.generate(PROMPTS, **sampling))


def test_rows_that_end_at_different_times(graph, torch_llm):
    """Each prompt has a length of its own; the batch shrinks while it runs, over the buffers' growth."""
    from llmopt.runtime.engine.sampling_params import SamplingParams

    params = [SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True) for n in (3, 240, 0, 17)]
    found, expected = graph.generate(PROMPTS, params), torch_llm.generate(PROMPTS, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [len(one.token_ids) for one in found] == [3, 240, 0, 17]


def test_streaming(graph):
    chunks = list(graph.stream(PROMPTS[1], max_new_tokens=9, ignore_eos=True))
    whole = graph.generate(PROMPTS[1], max_new_tokens=9, ignore_eos=True)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]


def test_scores(graph, torch_llm):
    for found, expected in zip(graph.score(PROMPTS), torch_llm.score(PROMPTS)):
        assert found.logprobs[0] is None
        assert found.logprobs[1:] == pytest.approx(expected.logprobs[1:], abs=1e-4)


def test_long_prompts_run_in_pieces(artifact, torch_llm, monkeypatch):
    """By the scheduler's steps, and a call at a time where a step is longer than a call."""
    prompt = " ".join(PROMPTS * 4)
    expected, total = torch_llm.generate(prompt, max_new_tokens=5).token_ids, torch_llm.score(prompt).total
    monkeypatch.setattr("llmopt.runtime.ort.runner.LOGIT_BYTES", 0)
    monkeypatch.setattr("llmopt.runtime.ort.runner.SHORTEST", 16)
    with llmopt.load(artifact, max_num_seqs=4) as llm:
        assert len(llm.tokenizer.encode(prompt)) > 32
        assert llm.generate([prompt, "a"], max_new_tokens=5)[0].token_ids == expected
        assert llm.score(prompt).total == pytest.approx(total, abs=1e-2)
        llm.runner.chunk = 5
        assert llm.generate(prompt, max_new_tokens=5).token_ids == expected


def test_requests_join_and_leave_while_others_run(graph, torch_llm):
    """Each comes when the one before has begun; the batch is put together anew at each."""
    from llmopt.runtime.engine.sampling_params import SamplingParams

    graph.loop.start()
    handles, readers = [], []
    for number, prompt in enumerate(PROMPTS * 2):
        params = SamplingParams(max_new_tokens=30 - 3 * number, temperature=0.0, ignore_eos=True)
        handles.append(graph.loop.submit(graph.tokenizer.encode(prompt), params))
        readers.append(iter(handles[-1]))
        next(readers[-1])
    found = [handle.result(60)[0].token_ids for handle in handles]
    for number, (prompt, tokens) in enumerate(zip(PROMPTS * 2, found)):
        assert tokens == torch_llm.generate(prompt, max_new_tokens=30 - 3 * number, ignore_eos=True).token_ids


def test_a_step_that_fails_ends_its_culprit_alone(graph, torch_llm, monkeypatch):
    session = graph.runner.session
    run = session.run

    def failing(ids, cache):
        if any(list(row)[-1] == poison for row in ids):
            raise RuntimeError("a poisonous token")
        return run(ids, cache)

    expected = torch_llm.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
    poison = next(t for t in expected[3].token_ids[2:] if all(t not in one.token_ids for one in expected[:3]))
    monkeypatch.setattr(session, "run", failing)
    graph.loop.start()
    from llmopt.runtime.engine.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    handles = [graph.loop.submit(one.prompt_token_ids, params) for one in expected]
    found = [handle.result(60)[0] for handle in handles]
    assert [one.finish_reason for one in found] == ["length"] * 3 + ["error"]
    assert [one.token_ids for one in found[:3]] == [one.token_ids for one in expected[:3]]


def test_what_it_says_of_itself(graph, artifact):
    assert graph.backend == "onnxruntime" and graph.vocab_size == 400 and graph.context_length == 256
    assert any("onnxruntime" in note["message"] for note in graph.notes)
    files = [artifact / name for name in ("model.onnx", "model.onnx_data")]
    assert graph.weight_bytes == sum(file.stat().st_size for file in files)
    assert graph.manifest is None or graph.manifest["exporter"]["name"] == "onnx"
    with pytest.raises(llmopt.UsageError, match="has no torch module"):
        _ = graph.module


@pytest.mark.parametrize("artifact", ["genai"], indirect=True)
def test_verify(artifact, tmp_path):
    assert verify(artifact) == {"files": len(json.loads((artifact / "llmopt.json").read_text())["files"])} | {
        "prompts": 3, "compared": True
    }  # fmt: skip
    damaged = tmp_path / "damaged"
    shutil.copytree(artifact, damaged)
    data = bytearray((damaged / "model.onnx_data").read_bytes())
    data[100] ^= 1
    (damaged / "model.onnx_data").write_bytes(bytes(data))
    with pytest.raises(llmopt.RunError, match=r"model\.onnx_data: the file was changed or damaged"):
        llmopt.load(damaged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "native"}, "does not run on engine 'native'"),
        ({"attention": "eager"}, "takes no option 'attention'"),
        ({"draft": {"kind": "ngram"}}, "takes no option 'draft'"),
        ({"max_batch": 4}, "the engine onnxruntime has no option 'max_batch'"),
        ({"dtype": "bfloat16"}, "computes in float32, not in bfloat16"),
        ({"device": "tpu"}, "has no device 'tpu'"),
    ],
)
def test_what_it_cannot_do(options, message, artifact):
    with pytest.raises(llmopt.UsageError, match=message):
        llmopt.load(artifact, **options)


def test_no_cuda(artifact):
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    for device, name in (("cuda", "CUDA"), ("tensorrt:1", "TensorRT")):
        with pytest.raises(llmopt.UsageError, match=f"has no {name}"):
            llmopt.load(artifact, device=device)


def test_devices_by_what_onnxruntime_has():
    from llmopt.runtime.ort.session import _device

    class Library:
        def __init__(self, *providers):
            self.get_available_providers = lambda: [*providers, "CPUExecutionProvider"]

    cuda, both = Library("CUDAExecutionProvider"), Library("TensorrtExecutionProvider", "CUDAExecutionProvider")
    assert _device(Library(), "auto") == ("cpu", 0) and _device(cuda, "auto") == _device(both, "auto") == ("cuda", 0)
    assert _device(cuda, "cuda:1") == ("cuda", 1) and _device(both, "tensorrt:2") == ("tensorrt", 2)
    with pytest.raises(llmopt.UsageError, match="has no TensorRT"):
        _device(cuda, "tensorrt")


def test_structured_output(graph):
    pytest.importorskip("llguidance")
    found = graph.generate(PROMPTS[:2], regex="[a-c]{3}[0-9]", max_new_tokens=12)
    assert all(re.fullmatch("[a-c]{3}[0-9]", one.text) for one in found)


def test_a_graph_that_is_no_decoder(artifact, tmp_path):
    import onnx
    from onnx import TensorProto, helper

    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    (copy / "llmopt.json").unlink(missing_ok=True)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", value[:1], value[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), copy / "model.onnx")
    with pytest.raises(llmopt.RunError, match="no decoder with a KV cache"):
        llmopt.load(copy)
    (copy / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(llmopt.RunError, match="onnxruntime does not open the graph"):
        llmopt.load(copy)
