"""OpenAI's endpoints over a fake model: shapes, streams, parameters that work and those that are refused."""

import json
from pathlib import Path

import pytest
from llmopt.optimizer.errors import UsageError
from llmopt.runtime.engine.fake_runner import greedy_continuation
from llmopt.runtime.server.settings import ServerSettings

pytest.importorskip("fastapi")
from llmopt.runtime.server.app import PAGE_FILES
from llmopt.tests.server_helpers import VOCAB, Server, tokenizer, until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with Server() as running:
        yield running


def encode(text):
    return tokenizer()(text)["input_ids"]


def test_completion(server):
    status, answer, headers = server.post(
        "/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0, "user": "me"}
    )
    expected = greedy_continuation(encode("hello"), 6, VOCAB)
    assert status == 200 and answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["choices"][0]["text"] == tokenizer().decode(expected)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == 6 + len(encode("hello"))
    assert headers["x-request-id"]


def test_many_prompts_and_n(server):
    body = {"prompt": [[8], [5, 6, 7]], "n": 2, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    choices = server.post("/v1/completions", body)[1]["choices"]
    first, second = greedy_continuation([8], 4, VOCAB), greedy_continuation([5, 6, 7], 4, VOCAB)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in choices] == [first, first, second, second]


def test_the_stream_says_what_the_answer_says(server):
    body = {"prompt": ["hello", "you"], "n": 2, "max_tokens": 12, "seed": 3, "temperature": 1.5, "logprobs": 2}
    whole = server.post("/v1/completions", body)[1]
    events = server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for e in events[:-2] for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        tokens = [t for c in mine for t in c["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
    assert all(e["usage"] is None for e in events[:-2])


def test_echo_scores_the_prompt(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1}
    [choice] = server.post("/v1/completions", body)[1]["choices"]
    found = choice["logprobs"]
    assert choice["text"] == tokenizer().decode([5, 6, 7]) == "".join(found["tokens"])
    assert found["token_logprobs"][0] is None and all(value < 0 for value in found["token_logprobs"][1:])
    assert len(found["top_logprobs"]) == 3 and found["text_offset"][0] == 0
    streamed = server.stream("/v1/completions", {"prompt": "hello", "max_tokens": 1, "echo": True})
    assert streamed[0]["choices"][0]["text"] == "hello"


def test_chat(server):
    body = {"messages": HELLO, "max_completion_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    status, answer, _ = server.post(CHAT, body)
    prompt = encode(tokenizer().apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True))
    [choice] = answer["choices"]
    assert status == 200 and choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == tokenizer().decode(greedy_continuation(prompt, 5, VOCAB))
    entries = choice["logprobs"]["content"]
    assert len(entries) == 5 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert bytes(entries[0]["bytes"]).decode("utf-8", "replace") == entries[0]["token"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert server.post(CHAT, {**body, "messages": parts})[1]["choices"] == answer["choices"]


def test_chat_stream(server):
    body = {"messages": HELLO, "max_tokens": 9, "temperature": 0, "stream_options": {"include_usage": True}}
    events = server.stream(CHAT, body)
    assert events[-1] == "[DONE]" and events[-2]["usage"]["completion_tokens"] == 9
    deltas = [choice["delta"] for event in events[:-2] for choice in event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    whole = server.post(CHAT, {"messages": HELLO, "max_tokens": 9, "temperature": 0})[1]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]


def test_without_a_limit_a_chat_ends_with_the_context(server):
    answer = server.post(CHAT, {"messages": HELLO, "temperature": 0, "ignore_eos": True})[1]
    assert answer["usage"]["total_tokens"] == 512 and answer["choices"][0]["finish_reason"] == "length"


def test_stop_string(server):
    text = tokenizer().decode(greedy_continuation(encode("hello"), 8, VOCAB))
    stop = text[3:5]
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "stop": stop}
    [choice] = server.post("/v1/completions", body)[1]["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    [kept] = server.post("/v1/completions", {**body, "include_stop_str_in_output": True})[1]["choices"]
    assert kept["text"] == choice["text"] + stop


def test_extreme_values(server):
    """Each is in range, and would make logits infinite if it were just divided by."""
    body = {"prompt": "hello", "max_tokens": 5, "return_token_ids": True}
    expected = greedy_continuation(encode("hello"), 5, VOCAB)
    for change in ({"temperature": 5e-324}, {"temperature": 1e-30}, {"top_p": 5e-324}, {"min_p": 1.0}):
        assert server.post("/v1/completions", {**body, **change})[1]["choices"][0]["token_ids"] == expected
    for change in ({"repetition_penalty": 0.01}, {"repetition_penalty": 10}, {"top_k": 2**31 - 1}, {"temperature": 2}):
        assert server.post("/v1/completions", {**body, **change})[0] == 200
    assert server.post("/v1/completions", {**body, "repetition_penalty": 5e-324})[0] == 400
    assert server.post("/v1/completions", {**body, "deadline": 5e-324})[0] == 408


def test_logit_bias_and_seed(server):
    body = {"prompt": "x", "max_tokens": 3, "logit_bias": {"77": 100}, "return_token_ids": True}
    assert server.post("/v1/completions", body)[1]["choices"][0]["token_ids"] == [77, 77, 77]
    seeded = {"prompt": "x", "max_tokens": 8, "seed": -5}
    texts = [server.post("/v1/completions", seeded)[1]["choices"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1] != server.post("/v1/completions", {**seeded, "seed": 6})[1]["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(server, stream):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    body = {
        "messages": HELLO,
        "response_format": form,
        "max_tokens": 60,
        "logit_bias": {str(t): -100 for t in encode(" ")},
    }
    if stream:
        events = server.stream(CHAT, body)[:-1]
        text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    else:
        text = server.post(CHAT, body)[1]["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"ok"}


def test_tools(server, monkeypatch):
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}}]
    body = {"messages": HELLO, "tools": tools, "max_tokens": 200, "seed": 1}
    status, answer, _ = server.post(CHAT, body)
    assert status == 400 and "no place for tools" in answer["error"]["message"]  # the template would drop them
    assert server.post(CHAT, {**body, "tool_choice": "none", "max_tokens": 2})[0] == 200
    pytest.importorskip("llguidance")
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + tokenizer().chat_template
    monkeypatch.setattr(tokenizer(), "chat_template", template)
    monkeypatch.setattr(server.host.model, "tool_template", True)
    plain = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[1]["usage"]["prompt_tokens"]
    with_tools = server.post(CHAT, {**body, "max_tokens": 1})[1]["usage"]["prompt_tokens"]
    without = server.post(CHAT, {"messages": HELLO, "max_tokens": 1})[1]["usage"]["prompt_tokens"]
    assert with_tools > without > plain
    forced = {**body, "tool_choice": {"type": "function", "function": {"name": "now"}}}
    [choice] = server.post(CHAT, forced)[1]["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "now"
    assert json.loads(call["function"]["arguments"]) == {}
    events = [c for e in server.stream(CHAT, {**forced, "tool_choice": "required"})[:-1] for c in e["choices"]]
    assert [c["delta"]["tool_calls"][0]["function"]["name"] for c in events if "tool_calls" in c["delta"]] == ["now"]
    assert events[-1]["finish_reason"] == "tool_calls"


WRONG = [
    ({}, "prompt"),
    ({"prompt": "x", "tempature": 1}, "tempature"),
    ({"prompt": "x", "temperature": 3}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "n": True}, "n"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, None),
    ({"prompt": "x", "logit_bias": {"400": 1}}, None),
    ({"prompt": "x", "logit_bias": {"4": 101}}, "logit_bias"),
    ({"prompt": "x", "stop_token_ids": [400]}, None),
    ({"prompt": [400]}, None),
    ({"prompt": [-1]}, None),
    ({"prompt": []}, None),
    ({"prompt": [[]]}, None),
    ({"prompt": "\ud800"}, None),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "best_of": 4}, None),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, None),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"prompt": "x", "response_format": {"type": "json_object"}, "regex": "a"}, None),
    ({"prompt": "x", "min_tokens": 20, "max_tokens": 10}, None),
    ({"prompt": ["x"] * 100, "n": 2}, "n"),
    ({"prompt": "x", "store": True}, "store"),
    ([1], None),
    (b"{", None),
    (b'{"prompt": NaN}', "prompt"),
    (b"[" * 100_000, None),
    (b"\xff\xfe", None),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_honoured_is_refused(server, body, param):
    status, answer, _ = server.post("/v1/completions", body)
    error = answer["error"]
    assert status == 400 and error["type"] == "invalid_request_error" and error["message"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"top_logprobs": 2},
        {"tool_choice": "required"},
        {"max_tokens": 2, "max_completion_tokens": 3},
        {"parallel_tool_calls": False},
        {"chat_template_kwargs": {"tokenize": True}},
        {"functions": []},
    ],
    ids=str,
)
def test_bad_chats_are_refused(server, change):
    status, answer, _ = server.post(CHAT, {"messages": HELLO, **change})
    assert status == 400 and answer["error"]["message"]


def test_overflow_has_its_code(server):
    for body in ({"prompt": "x", "max_tokens": 600}, {"prompt": [5] * 600}, {"prompt": "y" * 400_000}):
        status, answer, _ = server.post("/v1/completions", body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    status, answer, _ = server.post(CHAT, {"messages": [{"role": "user", "content": "word " * 900}]})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_unknown_model_and_paths(server):
    status, answer, _ = server.post("/v1/completions", {"model": "gpt-9é", "prompt": "x"})
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    assert server.get("/v1/nothing")[0] == 404 and server.get("/v1/completions")[0] == 405
    assert server.post("/admin/reload", {})[0] == 404  # no admin key, no such path
    assert server.get("/v1/models/tiny")[1]["max_model_len"] == 512 and server.get("/v1/models/none")[0] == 404


def test_other_content_types_are_refused(server):
    """A page elsewhere can send text/plain to a loopback server without asking; JSON it cannot."""
    status, _, _ = server.request("POST", "/v1/completions", b'{"prompt": "x"}', {"Content-Type": "text/plain"})
    assert status == 400


def test_tokens(server):
    answer = server.post("/tokenize", {"prompt": "hello you", "return_token_strs": True})[1]
    assert answer["tokens"] == encode("hello you") and answer["count"] == len(answer["token_strs"])
    assert server.post("/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": "hello you"}
    assert server.post("/detokenize", {"tokens": []})[1] == {"prompt": ""}
    assert server.post("/tokenize", {"messages": HELLO})[1]["count"] > answer["count"]
    assert server.post("/tokenize", {})[0] == server.post("/detokenize", {"tokens": [4000]})[0] == 400


def test_generate(server):
    status, answer, _ = server.post("/generate", {"prompt": "hello", "max_new_tokens": 6})
    assert status == 200 and answer["token_ids"] == greedy_continuation(encode("hello"), 6, VOCAB)
    assert answer["text"] == tokenizer().decode(answer["token_ids"]) and answer["finish_reason"] == "length"


def test_metrics(server):
    before = server.metrics()
    server.post("/v1/completions", {"prompt": [9] * 20, "max_tokens": 4, "ignore_eos": True})
    server.post("/v1/completions", {"prompt": "x", "n": 0})
    now = server.metrics()

    def gained(name):
        return now[name] - before.get(name, 0.0)

    label = '{model_name="tiny"}'
    assert gained(f"llmopt:generation_tokens_total{label}") == 4
    assert gained(f"llmopt:prompt_tokens_total{label}") == 20
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert gained(f"llmopt:{name}_count{label}") == 1
    assert gained(f"llmopt:inter_token_latency_seconds_count{label}") == 3
    assert gained('llmopt:request_rejected_total{reason="invalid"}') == 1
    assert now[f"llmopt:kv_blocks_free{label}"] == now[f"llmopt:kv_blocks_total{label}"] == 256
    assert now[f"llmopt:num_requests_running{label}"] == now[f"llmopt:num_requests_waiting{label}"] == 0
    assert 'llmopt:request_success_total{finished_reason="length",model_name="tiny"}' in now
    assert now["process_resident_memory_bytes"] > 1e6


def test_the_log_has_no_text(server):
    secret = "a quite peculiar sentence"
    server.post("/v1/completions", {"prompt": secret, "max_tokens": 2})
    server.post("/v1/completions", {"prompt": secret, "max_tokens": 2, "temperature": secret})
    server.post("/v1/completions", {"prompt": secret, "model": secret})
    until(lambda: server.events()[-1]["status"] == 404)  # a line is written after its answer
    lines = server.events()
    assert "peculiar" not in server.log.getvalue()
    assert {"request_id", "method", "path", "seconds", "client"} <= set(lines[-1])


def test_request_ids(server):
    assert server.get("/v1/models", **{"X-Request-Id": "abc-1"})[2]["x-request-id"] == "abc-1"
    assert server.get("/v1/models", **{"X-Request-Id": "a b\t"})[2]["x-request-id"] != "a b"


def test_the_page(server):
    status, text, headers = server.get("/")
    assert status == 200 and "<canvas" in text and "default-src 'none'" in headers["content-security-policy"]
    for path in ("/page/app.js", "/page/chart.js", "/page/style.css"):
        assert server.get(path)[0] == 200
    assert "http://" not in text and "https://" not in text  # nothing from elsewhere
    declared = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    for name, _ in PAGE_FILES.values():
        assert f'"page/*{Path(name).suffix}"' in declared  # the wheel has it


def test_openapi(server):
    document = server.get("/openapi.json")[1]
    answers = document["paths"]["/v1/completions"]["post"]["responses"]
    assert "422" not in answers and {"200", "400", "401", "413", "429", "503"} <= set(answers)


def test_settings_are_checked():
    ServerSettings(host="::1").check()
    ServerSettings(host="0.0.0.0", insecure=True).check()
    for wrong in (
        {"host": "0.0.0.0"},
        {"host": "example.org"},
        {"api_keys": ("",)},
        {"api_keys": ("ü",)},
        {"max_queue": -1},
    ):
        with pytest.raises(UsageError):
            ServerSettings(**wrong).check()
