"""`llmopt serve` on the command line, and a real (tiny) model behind the server."""

import sys

import llmopt
import pytest
from llmopt.optimizer.cli import main
from llmopt.optimizer.cli.serve import engine_options
from llmopt.optimizer.errors import MissingDependency, RunError, UsageError
from llmopt.runtime.server.model import serve_llm
from llmopt.runtime.server.serve import check_libraries


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["serve", *arguments])
    return stop.value.code, capsys.readouterr().err


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingDependency, match=r"'uvicorn'.*pip install 'llmopt\[serve\]'"):
        check_libraries()


def test_tracing_without_its_extra_is_refused(monkeypatch):
    pytest.importorskip("fastapi")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(MissingDependency, match=r"llmopt\[opentelemetry\]"):
        check_libraries(tracing=True)


def test_options():
    assert engine_options(("max_num_seqs=64", "activation=int8", "prefix_caching=false")) == {
        "max_num_seqs": 64,
        "activation": "int8",
        "prefix_caching": False,
    }
    for wrong in ("max_num_seqs", "=3", "a b=3", "x=[1"):
        with pytest.raises(UsageError, match="--set"):
            engine_options((wrong,))


def test_refusals(capsys, tmp_path, tiny_model, monkeypatch):
    pytest.importorskip("fastapi")
    monkeypatch.delenv("LLMOPT_API_KEY", raising=False)
    code, text = fails(capsys, str(tiny_model), "--host", "0.0.0.0")
    assert code == 2 and "--insecure" in text
    keys = tmp_path / "keys"
    keys.write_text("# none\n\n")
    code, text = fails(capsys, str(tiny_model), "--api-key-file", str(keys))
    assert code == 2 and "holds no key" in text
    code, text = fails(capsys, str(tmp_path / "nothing"), "--port", "0")
    assert code == 2 and "nothing" in text and "Traceback" not in text
    code, text = fails(capsys, str(tiny_model), "--port", "0", "--set", "no_such_option=1")
    assert code == 2 and "no_such_option" in text


def test_a_real_model(tiny_model):
    pytest.importorskip("fastapi")
    from llmopt.tests.server_helpers import Server

    def load(source):
        return serve_llm(llmopt.load(tiny_model, dtype="float32", kv_cache_memory=2**22), "tiny", 100)

    chat = [{"role": "user", "content": "Tell me about the sea"}]
    with llmopt.load(tiny_model, dtype="float32", kv_cache_memory=2**22) as llm:
        expected = llm.generate(chat, max_new_tokens=12).text
        score = llm.score("The sea is").logprobs
    with Server(load) as server:
        body = {"messages": chat, "max_tokens": 12, "temperature": 0}
        assert server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == expected
        body = {"prompt": "The sea is", "max_tokens": 0, "echo": True, "logprobs": 0}
        found = server.post("/v1/completions", body)[1]["choices"][0]["logprobs"]["token_logprobs"]
        assert found[1:] == pytest.approx(score[1:], abs=1e-4) and found[0] is score[0] is None
        assert server.get("/v1/models")[1]["data"][0]["max_model_len"] == 100


def test_a_model_without_an_engine_is_refused(tiny_model):
    with pytest.raises(RunError, match="native engine"):
        serve_llm(llmopt.load(tiny_model, engine="static"), "tiny", None)
