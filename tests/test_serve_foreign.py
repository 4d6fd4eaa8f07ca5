"""`llmopt serve` and `llmopt bench` on models that another library runs: onnxruntime, a stand-in for llama-server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmopt
import pytest
from llmopt.optimizer.cli import main

pytest.importorskip("fastapi")
from llmopt.runtime.server.model import ServedModel, serve_llm
from llmopt.tests.llama_stand_in import follow, write_folder, write_program
from llmopt.tests.server_helpers import Server, until
from llmopt.tests.test_server_lifecycle import PATH, free, in_background, raw

LOADER = Callable[[Any], ServedModel]


@pytest.fixture(scope="module")
def onnx_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from llmopt.tests.onnx_models import save_family, write_graph

    folder = tmp_path_factory.mktemp("onnx")
    return write_graph(save_family("llama", folder / "source"), folder / "graph")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folder and program."""
    folder = tmp_path_factory.mktemp("gguf")
    return write_folder(folder), write_program(folder)


@pytest.fixture(params=["onnx", "gguf"])
def loader(request: pytest.FixtureRequest) -> LOADER:
    """Each with two places."""
    if request.param == "onnx":
        folder, options = request.getfixturevalue("onnx_folder"), {}
    else:
        folder, program = request.getfixturevalue("gguf")
        options = {"llama_server": str(program), "max_model_len": 200}

    def load(source: Any) -> ServedModel:
        return serve_llm(llmopt.load(folder, max_num_seqs=2, **options), "tiny", None)

    return load


def test_answers_streams_and_metrics(loader: LOADER) -> None:
    body = {"prompt": [[20, 21], [22], [30, 31, 32]], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with Server(loader) as server:
        model = server.host.model
        assert model is not None and model.max_num_seqs == 2
        status, whole, _ = server.post(PATH, {**body, "return_token_ids": True})
        assert status == 200 and whole["usage"]["completion_tokens"] == 36
        texts = ["", "", ""]
        for event in server.stream(PATH, body)[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        if model.loop.engine.runner.__class__.__name__ == "LlamaSlots":
            tokens = [choice["token_ids"] for choice in whole["choices"]]
            assert tokens == [follow(last, 12) for last in (21, 22, 32)]
        status, scored, _ = server.post(PATH, {"prompt": [20, 67, 11], "max_tokens": 0, "echo": True, "logprobs": 1})
        assert status == 200 and len(scored["choices"][0]["logprobs"]["token_logprobs"]) == 3
        until(lambda: free(server))
        label = '{model_name="tiny"}'
        found = server.metrics()
        expected = {"sequences_accepted_total": 7, "sequences_ended_total": 7, "generation_tokens_total": 72}
        expected |= {"prompt_tokens_total": 15, "kv_blocks_total": 2, "kv_blocks_free": 2, "num_preemptions_total": 0}
        expected |= {"prefix_cache_hits_total": 0, "num_requests_running": 0}
        assert {name: found[f"llmopt:{name}{label}"] for name in expected} == expected
        assert found[f"llmopt:time_to_first_token_seconds_count{label}"] == 6
        assert found[f"llmopt:engine_steps_total{label}"] > 0


def test_stop_strings_and_refusals(loader: LOADER) -> None:
    with Server(loader) as server:
        body = {"prompt": [20], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        text = server.post(PATH, body)[1]["choices"][0]["text"]
        stop = text[3:5]
        choice = server.post(PATH, {**body, "stop": stop})[1]["choices"][0]
        assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
        status, answer, _ = server.post(PATH, {**body, "max_tokens": 10_000})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        refused = server.post(PATH, {**body, "presence_penalty": 0.5})
        if server.engine.runner.__class__.__name__ == "LlamaSlots":
            assert refused[0] == 400 and "no equivalent of presence_penalty" in refused[1]["error"]["message"]
        else:
            assert refused[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(loader: LOADER, stream: bool) -> None:
    long = {"prompt": [15, 6], "max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": stream}
    with Server(loader) as server:
        onnx = server.engine.runner.__class__.__name__ == "OnnxRunner"
        if onnx:
            slow_down(server)
        clients = [raw(server, long) for _ in range(2)]
        until(lambda: server.host.accepted == 2)
        for client in clients:
            client.close()
        until(lambda: server.host.ended == 2 and free(server))
        assert server.engine.metrics().request_success_total == {"abort": 2}
        assert server.post(PATH, {"prompt": [20], "max_tokens": 3})[0] == 200


def slow_down(server: Server) -> None:
    """Steps of an ONNX graph that take long enough for a client to leave between them."""
    import time

    execute = server.engine.runner.execute

    def slowly(plan: Any) -> Any:
        time.sleep(0.05)
        return execute(plan)

    server.engine.runner.execute = slowly  # type: ignore[method-assign]


def test_a_full_queue_refuses(loader: LOADER) -> None:
    """Two run, two more have the places that keep the engine fed, and one waits; the next is refused at once."""
    with Server(loader, max_queue=1) as server:
        if server.engine.runner.__class__.__name__ == "OnnxRunner":
            slow_down(server)
        body = {"prompt": [15, 6], "max_tokens": 150, "ignore_eos": True, "temperature": 0}
        clients = [raw(server, body) for _ in range(5)]
        until(lambda: server.host.queue.num_waiting == 1)
        status, answer, headers = server.post(PATH, body)
        assert status == 429 and answer["error"]["code"] == "queue_full" and "retry-after" in headers
        for client in clients:
            client.close()
        until(lambda: free(server) and server.host.queue.num_waiting == 0 and server.host.accepted == server.host.ended)


def test_a_llama_server_that_dies_is_started_again(gguf: tuple[Path, Path]) -> None:
    folder, program = gguf

    def load(source: Any) -> ServedModel:
        return serve_llm(llmopt.load(folder, llama_server=str(program), max_num_seqs=2), "tiny", None)

    with Server(load) as server:
        thread, found = in_background(lambda: server.post(PATH, {"prompt": [13], "max_tokens": 4}))
        thread.join()
        assert found[0][0] in (500, 503)
        until(lambda: server.host.restarts == 1 and server.host.ready)
        assert server.post(PATH, {"prompt": [20], "max_tokens": 3})[0] == 200


def test_bench(loader: LOADER, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, on the folder; the model's process is one of its own."""
    out = tmp_path / "out.json"
    if request.node.callspec.params["loader"] == "onnx":
        place = str(request.getfixturevalue("onnx_folder"))
    else:
        folder, program = request.getfixturevalue("gguf")
        place = f"{folder},llama_server={program},max_model_len=200"
    options = ["--rounds", "1", "--warmup", "1", "--num-prompts", "3", "--input-len", "8", "--output-len", "6"]
    with pytest.raises(SystemExit) as stop:
        main(["bench", "throughput", place, *options, "--num-threads", "1", "--json", str(out), "--log", "none"])
    assert stop.value.code == 0
    found = json.loads(out.read_text())
    metrics = found["cases"][0]["results"][0]["summary"]["metrics"]
    assert metrics["completed"] == 3 and metrics["total_output"] == 18
    assert found["targets"][0]["engine"] in ("onnxruntime", "llamacpp")


def test_the_engine_is_named_where_it_is_another(gguf: tuple[Path, Path]) -> None:
    with pytest.raises(llmopt.UsageError, match="does not run on engine 'native'"):
        llmopt.load(gguf[0], engine="native")
