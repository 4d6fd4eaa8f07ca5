"""Clients that mean harm: bodies of a million faults, connections that never finish, schemas without a text."""

import json
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")
from llmopt.optimizer.errors import UsageError
from llmopt.runtime.engine.grammar import Grammar
from llmopt.runtime.server import prompts, utilities
from llmopt.runtime.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest
from llmopt.tests.server_helpers import WAIT, Server, until
from pydantic import ValidationError

PATH = "/v1/completions"
MANY = 3000
KEYS = {f"k{number}": 0 for number in range(MANY)}
USER = {"role": "user", "content": "x"}
FLOODS = [
    (CompletionRequest, {"prompt": [{}] * MANY}),
    (CompletionRequest, {"prompt": [1, "a"] * MANY}),
    (CompletionRequest, {"prompt": [[1], ["a"]] * MANY}),
    (CompletionRequest, {"prompt": "x", **KEYS}),
    (CompletionRequest, {"prompt": "x", "metadata": KEYS}),
    (CompletionRequest, {"prompt": "x", "logit_bias": KEYS}),
    (CompletionRequest, {"prompt": "x", "logit_bias": {str(number): "a" for number in range(MANY)}}),
    (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
    (CompletionRequest, {"prompt": "x", "stop_token_ids": [""] * MANY}),
    (ChatRequest, {"messages": [{}] * MANY}),
    (ChatRequest, {"messages": [{**USER, **KEYS}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "user", "tool_calls": [{}] * MANY}]}),
    (ChatRequest, {"messages": [USER], "tools": [{}] * MANY}),
    (DetokenizeRequest, {"tokens": [{}] * MANY}),
]


@pytest.fixture(scope="module")
def server():
    with Server() as running:
        yield running


@pytest.mark.parametrize(("kind", "body"), FLOODS, ids=range(len(FLOODS)))
def test_a_flood_of_faults_costs_a_few_reports(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert 1 <= caught.value.error_count() <= 10


def test_a_million_prompts_are_refused_before_they_are_tokenized(server, monkeypatch):
    monkeypatch.setattr(prompts, "text_or_ids", lambda *arguments: pytest.fail("it was tokenized"))
    status, answer, _ = server.post(PATH, {"prompt": ["a"] * 200_000, "max_tokens": 1})
    assert status == 400 and answer["error"]["param"] == "n" and "200000 sequences" in answer["error"]["message"]
    status, answer, _ = server.post(PATH, {"prompt": ["a", "b"], "n": 100, "max_tokens": 1})
    assert status == 400 and answer["error"]["param"] == "n"


@pytest.mark.parametrize("name", ["", "\ud800", "a" * 5000, "__class__"])
def test_unknown_names_come_back_whole_or_shortened(server, name):
    status, answer, _ = server.post(PATH, {"prompt": "x", name: 1})
    error = answer["error"]
    assert status == 400 and error["code"] == "unknown_parameter" and len(error["param"]) <= 1000
    assert error["param"] == name[:200].encode("utf-8", "replace").decode()
    status, answer, _ = server.post("/v1/chat/completions", {"messages": [{**USER, name: 1}]})
    assert status == 400 and answer["error"]["code"] == "unknown_parameter"
    assert answer["error"]["param"].startswith("messages.0.")


def test_logit_bias_faults_name_the_token(server):
    for bias, said in [
        ({"4": 101}, "token 4"),
        ({"9" * 5000: 1}, "no token id"),
        ({"²": 1}, "no token id"),
        ({"4": True}, "token 4"),
        ({"4": float("nan")}, "token 4"),
        ({"99999999": 1}, "outside the vocabulary"),
        ({"-1": 1}, "outside the vocabulary"),
    ]:
        status, answer, _ = server.post(PATH, {"prompt": "x", "logit_bias": bias})
        assert status == 400 and said in answer["error"]["message"] and len(answer["error"]["message"]) <= 1000
    assert server.post(PATH, {"prompt": "x", "max_tokens": 1, "logit_bias": {"4": -100, "5": 1.5}})[0] == 200


@pytest.mark.parametrize("length", ["5000000", "99999999999999999999"])
def test_a_body_that_is_too_large_by_its_own_word_is_not_waited_for(server, length):
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
        client.sendall(head(f"Content-Length: {length}\r\n"))
        assert b" 413 " in client.recv(4096).splitlines()[0]


def head(fields: str = "") -> bytes:
    return f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{fields}\r\n".encode()


def read_all(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(4096):
        received += data
    return received


def test_heads_that_never_end_are_given_up():
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    whole = head(f"Content-Length: {len(body)}\r\n") + body
    with Server(head_seconds=0.3) as server:
        for start in (b"", b"GET /v1/mod", head()[:-2]):
            with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
                client.sendall(start)
                assert read_all(client) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
            client.sendall(whole)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            client.sendall(b"GET /v1/mod")  # a second request on the same connection
            assert b"HTTP" not in read_all(client)
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
            for letter in b"GET /v1/models HTTP/1.1":  # trickling does not help
                time.sleep(0.05)
                try:
                    client.sendall(bytes([letter]))
                except OSError:
                    break
            else:
                assert read_all(client) == b""
        server.gate.clear()
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
            client.sendall(whole)
            time.sleep(0.6)  # longer than a head may take: the answer may take what it needs
            server.gate.set()
            assert client.recv(4096).startswith(b"HTTP/1.1 200")


def test_bodies_that_never_end_are_given_up():
    with Server(body_seconds=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
            client.sendall(head("Content-Length: 50\r\n") + b'{"prompt"')
            answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        server.gate.clear()
        found = []
        thread = threading.Thread(target=lambda: found.append(server.post(PATH, {"prompt": "x", "max_tokens": 1})))
        thread.start()
        time.sleep(0.6)
        server.gate.set()
        thread.join()
        assert found[0][0] == 200


def test_a_client_that_closes_its_half_is_gone(server):
    body = json.dumps({"prompt": "x", "max_tokens": 300, "ignore_eos": True}).encode()
    accepted = server.host.accepted
    server.gate.clear()
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as client:
        client.sendall(head(f"Content-Length: {len(body)}\r\n") + body)
        until(lambda: server.host.accepted == accepted + 1)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
    server.gate.set()
    until(lambda: server.host.ended == server.host.accepted and server.host.model.users == 0)
    pool = server.engine.scheduler.pool
    until(lambda: pool.num_free == pool.num_blocks)


def test_clients_take_turns_at_being_tokenized(monkeypatch):
    order, gate, plain = [], threading.Event(), utilities.text_or_ids

    def slow(model, item, *more):
        order.append(item)
        assert gate.wait(WAIT)
        return plain(model, item, *more)

    monkeypatch.setattr(utilities, "text_or_ids", slow)
    with Server(api_keys=("one", "two")) as server:

        def ask(text, key):
            return server.post("/tokenize", {"prompt": text}, Authorization=f"Bearer {key}")[0]

        statuses = []
        threads = []
        for number, (text, key) in enumerate([*((f"a{i}", "one") for i in range(5)), ("b", "two")]):
            threads.append(threading.Thread(target=lambda text=text, key=key: statuses.append(ask(text, key))))
            threads[-1].start()
            until(lambda number=number: order and server.host.turns.num_waiting == number)
        gate.set()
        [thread.join() for thread in threads]
        assert statuses == [200] * 6 and order.index("b") <= 2 and server.host.turns.num_held == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_without_any_text_is_refused(server, stream):
    pytest.importorskip("llguidance")
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    for schema in ({"$ref": "#"}, loop):
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body = {"messages": [USER], "response_format": form, "max_tokens": 3, "stream": stream}
        status, answer, _ = server.post("/v1/chat/completions", body)
        assert status == 400 and "no text can match" in answer["error"]["message"]


def test_a_schema_that_grows_too_complex_is_the_clients_fault(server, monkeypatch):
    pytest.importorskip("llguidance")

    def too_complex(self, vocab_size):
        raise UsageError("the schema or expression is too complex (row has 22000 items)", where="grammar")

    monkeypatch.setattr(Grammar, "_mask", too_complex)
    status, answer, _ = server.post(PATH, {"prompt": "x", "max_tokens": 3, "regex": "[a-z]+"})
    assert status == 400 and "too complex" in answer["error"]["message"]
    monkeypatch.undo()
    branches = [{"type": "object", "properties": {f"p{number}": {"type": "integer"}}} for number in range(400)]
    form = {"type": "json_schema", "json_schema": {"schema": {"anyOf": branches}}}
    body = {"messages": [USER], "response_format": form, "max_tokens": 3}
    status, answer, _ = server.post("/v1/chat/completions", body)
    assert status == 400 and "too complex" in answer["error"]["message"]
    assert server.post(PATH, {"prompt": "x", "max_tokens": 3, "regex": "[a-z]+"})[0] == 200


@pytest.mark.parametrize("depth", [60, 900, 20_000])
def test_deep_schemas_are_no_failure_of_the_server(server, depth):
    pytest.importorskip("llguidance")
    schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    form = f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"max_tokens":2,"response_format":{form}}}'
    assert server.post("/v1/chat/completions", body.encode())[0] in (200, 400)
