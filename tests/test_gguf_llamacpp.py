"""The backend llamacpp: against a stand-in for llama-server, and against llama.cpp itself where there is one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llmopt
import pytest
from llmopt.optimizer.errors import MissingDependency, RunError, UsageError
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.llamacpp import find
from llmopt.runtime.llamacpp.find import find_server
from llmopt.runtime.llamacpp.parameters import body, seed

from .gguf_models import save_family
from .llama_stand_in import follow, write_folder, write_program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def llm(program: Path, folder: Path) -> Iterator[Any]:
    with llmopt.load(folder, llama_server=str(program), max_num_seqs=2, max_model_len=200) as opened:
        yield opened


def test_texts_of_several_prompts(llm: Any) -> None:
    assert llm.backend == "llamacpp" and llm.context_length == 200 and "llama.cpp" in llm.notes[0]["message"]
    prompts = [[20], [21, 22], [23], [24]]
    found = llm.generate(prompts, max_new_tokens=37)
    assert [one.token_ids for one in found] == [follow(prompt[-1], 37) for prompt in prompts]
    assert {one.finish_reason for one in found} == {"length"}
    assert llm.generate([20], max_new_tokens=0).token_ids == []
    assert llm.generate([20] * 190, max_new_tokens=None).num_tokens == 10


def test_stops_are_the_engines(llm: Any) -> None:
    ids = follow(20, 8)
    done = llm.generate([20], max_new_tokens=30, stop_token_ids=(ids[4],))
    assert done.token_ids == ids[:5] and done.finish_reason == "stop" and done.stop_reason == ids[4]
    whole = llm.tokenizer.decode(ids)
    text = llm.generate([20], max_new_tokens=8).text
    assert text == whole
    stopped = llm.generate([20], max_new_tokens=30, stop=whole[4:7])
    assert stopped.text == whole[: whole.index(whole[4:7])] and stopped.stop_reason == whole[4:7]
    later = llm.generate([20], max_new_tokens=30, stop_token_ids=(ids[1],), min_tokens=6)
    assert ids[1] not in later.token_ids[:6] and later.num_tokens >= 6


def test_the_servers_own_end_is_not_ours(llm: Any) -> None:
    done = llm.generate([20], max_new_tokens=9, logit_bias={9: 101.0})  # the stand-in ends each request there
    assert done.token_ids == [9] * 9 and done.finish_reason == "length"


def test_streaming_logprobs_and_scores(llm: Any) -> None:
    chunks = list(llm.stream([20], max_new_tokens=20))
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 2, 4, 8, 5]
    assert [t for chunk in chunks for t in chunk.token_ids] == follow(20, 20)
    done = llm.generate([20], max_new_tokens=3, logprobs=1)
    assert [(p.token_id, p.logprob, p.rank) for p in done.logprobs] == [(t, -0.5, 1) for t in follow(20, 3)]
    score = llm.score([20, 67, 11])
    assert score.logprobs == [None, -0.5, -2.0]


def test_what_llama_cpp_has_not(llm: Any) -> None:
    for options in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"regex": "a"}):
        with pytest.raises(UsageError, match=f"no equivalent of {next(iter(options))}"):
            llm.generate([20], **options)
    with pytest.raises(UsageError, match="neither logprobs nor min_tokens"):
        llm.generate([20], json_schema={}, logprobs=1)
    with pytest.raises(RunError, match="llama-server answers 400: unlucky"):
        llm.generate([[20], [14]], max_new_tokens=4)
    with pytest.raises(UsageError, match="has no torch module"):
        _ = llm.module


def test_an_abort_breaks_a_request_off(llm: Any) -> None:
    """Both slots wait for an answer that does not come; given up, they are free for others."""
    engine = llm.loop.engine
    slow = [llm.loop.submit([15], SamplingParams(max_new_tokens=4)) for _ in range(2)]
    while engine.metrics().num_requests_running < 2:
        time.sleep(0.01)
    late = llm.loop.submit([20], SamplingParams(max_new_tokens=4), deadline=time.monotonic() + 0.2)
    assert late.result(30)[0].finish_reason == "deadline" and engine.metrics().num_requests_running == 2
    for handle in slow:
        handle.abort()
        assert handle.result(30)[0].finish_reason == "abort"
    found = llm.generate([[20], [21]], max_new_tokens=9)
    assert [one.token_ids for one in found] == [follow(20, 9), follow(21, 9)]


def test_requests_carry_the_parameters() -> None:
    from llmopt.runtime.engine.request import Request

    params = SamplingParams(
        temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, repetition_penalty=1.2, logit_bias={4: 1.5}
    )
    asked = body(Request(0, [1, 2, 3], params, key=5), 1, 8, frozenset())
    wanted = {"temperature": 0.5, "top_k": 0, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2, "id_slot": 1}
    assert {key: asked[key] for key in wanted} == wanted
    assert asked["repeat_last_n"] >= 3 and asked["logit_bias"] == [[4, 1.5]] and asked["samplers"][0] == "penalties"
    assert asked["seed"] == seed(5, 0) != seed(5, 1)
    assert body(Request(0, [1], SamplingParams(temperature=1.0, top_k=1)), 0, 1, frozenset())["temperature"] == 0.0


def test_a_server_that_ends_is_an_error_and_close_ends_it(program: Path, folder: Path) -> None:
    opened = llmopt.load(folder, llama_server=str(program), engine="llamacpp")
    server = opened.runner.server  # type: ignore[union-attr]
    with pytest.raises(RunError, match=r"llama-server has ended \(exit code 3\)"):
        opened.generate([13], max_new_tokens=2)
    while opened.loop.error is None:  # type: ignore[union-attr]
        time.sleep(0.01)
    with pytest.raises(RunError, match=r"the engine (loop has failed|is closed)"):
        opened.generate([20], max_new_tokens=2)
    opened.close()
    opened.close()
    assert not server.running
    with pytest.raises(RunError, match="is closed"):
        opened.generate([20])


def test_the_server_ends_with_its_owner(program: Path, tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        from llmopt.runtime.llamacpp.server import LlamaServer
        server = LlamaServer(Path({str(program)!r}), Path("model.gguf"), [])
        print(server.pid, flush=True)
        os.kill(os.getpid(), 9)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    pid = int(done.stdout)
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.02)
    assert done.returncode == -9 and not Path(f"/proc/{pid}").exists()


def test_opening_errors(program: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no option 'max_num_seq'.*max_num_seqs"):
        llmopt.load(folder, llama_server=str(program), max_num_seq=1)
    with pytest.raises(UsageError, match="does not run on engine 'static'"):
        llmopt.load(folder, engine="static")
    with pytest.raises(UsageError, match="is not a program"):
        llmopt.load(folder, llama_server=str(tmp_path / "absent"))
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    with pytest.raises(RunError, match="does not open it: error: broken model"):
        llmopt.load(broken, llama_server=str(program))
    monkeypatch.delenv(find.VARIABLE, raising=False)
    monkeypatch.setattr(find, "_packaged", lambda: None)
    monkeypatch.setattr(find, "_on_path", lambda: None)
    with pytest.raises(MissingDependency, match=r"llmopt\[llamacpp\]"):
        llmopt.load(folder)


@pytest.mark.skipif(find_server() is None, reason="there is no llama-server here")
def test_llama_cpp_itself(tmp_path: Path) -> None:
    """An export proved by llama.cpp, then run: its greedy text is the torch model's, and its parameters act alike."""
    from llmopt.exporters.gguf import GGUFExporter
    from llmopt.optimizer.export import export_artifact

    source = save_family("qwen3", tmp_path / "model", "float32")
    made = export_artifact(source, GGUFExporter(), tmp_path / "out")
    parity = made.manifest.exporter["parity"]
    assert parity["llama_cpp"] == "done" and parity["texts_of_equal_tokens"] == 4
    assert parity["logprob_max_difference"] < 1e-3
    options: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.3}, {"logit_bias": {30: 5.0}, "min_tokens": 3}]
    with (
        llmopt.load(tmp_path / "out" / "model.gguf", engine="llamacpp") as ours,
        llmopt.load(source, engine="static") as torch_model,
    ):
        for each in options:
            texts = [m.generate(["Once upon", "a time"], max_new_tokens=12, **each) for m in (ours, torch_model)]
            assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]
        scores = [m.score("Once upon a time").logprobs[1:] for m in (ours, torch_model)]
        assert scores[0] == pytest.approx(scores[1], abs=0.03)  # its cache is float16
