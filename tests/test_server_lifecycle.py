"""A server's life: disconnects, deadlines, full queues, slow readers, keys, drains, crashes, reloads."""

import json
import os
import signal
import socket
import threading
import time

import pytest
from llmopt.optimizer.errors import RunError

pytest.importorskip("fastapi")
from llmopt.runtime.server.serve import serve
from llmopt.runtime.server.settings import ServerSettings
from llmopt.tests.server_helpers import WAIT, Server, fake_model, until

LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
PATH = "/v1/completions"


def free(server):
    pool = server.engine.scheduler.pool
    return pool.num_free == pool.num_blocks


def send_request(connection, body):
    data = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    connection.sendall(head.encode() + b"\r\n" + data)


def raw(server, body):
    """A socket that has sent a request."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)
    send_request(connection, body)
    return connection


def in_background(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(stream):
    with Server() as server:
        server.gate.clear()
        client = raw(server, {**LONG, "stream": stream})
        until(lambda: server.host.accepted == 1)
        client.close()
        server.gate.set()
        until(lambda: server.host.ended == 1 and free(server))
        assert server.engine.metrics().request_success_total == {"abort": 1}
        until(lambda: server.host.queue.num_held == 0 and server.host.model.users == 0)
        until(lambda: any(line.get("error") in ("client_closed", "disconnected") for line in server.events()))


def test_a_client_that_leaves_the_queue_was_never_run():
    with Server(lambda source: fake_model(max_num_seqs=1)) as server:
        server.gate.clear()
        clients = [raw(server, LONG) for _ in range(5)]
        until(lambda: server.host.queue.num_waiting == 2)
        for client in clients:
            client.close()
        until(lambda: server.host.queue.num_waiting == 0)
        server.gate.set()
        until(lambda: server.host.ended == server.host.accepted == 3 and free(server))


def test_a_full_queue_refuses():
    with Server(lambda source: fake_model(max_num_seqs=1), max_queue=1) as server:
        server.gate.clear()
        clients = [raw(server, LONG) for _ in range(4)]
        until(lambda: server.host.queue.num_waiting == 1)
        status, answer, headers = server.post(PATH, LONG)
        assert status == 429 and answer["error"]["code"] == "queue_full" and int(headers["retry-after"]) > 0
        assert server.metrics()['llmopt:request_rejected_total{reason="queue_full"}'] == 1
        server.gate.set()
        [client.close() for client in clients]


def test_deadlines():
    with Server(lambda source: fake_model(max_num_seqs=1)) as server:
        server.gate.clear()
        thread, found = in_background(lambda: server.post(PATH, {**LONG, "deadline": 0.15}))
        until(lambda: server.host.accepted == 1)
        time.sleep(0.2)
        server.gate.set()
        thread.join()
        status, answer, _ = found[0]
        if status == 200:  # the step that was running has given a token
            assert answer["choices"][0]["finish_reason"] == "deadline"
        else:
            assert status == 408 and answer["error"]["code"] == "deadline_exceeded"
        until(lambda: free(server))
        server.gate.clear()
        clients = [raw(server, LONG) for _ in range(4)]
        until(lambda: server.host.queue.num_waiting == 1)
        status, answer, headers = server.post(PATH, {**LONG, "deadline": 0.1})
        assert status == 408 and headers["x-should-retry"] == "false"
        server.gate.set()
        [client.close() for client in clients]


def test_a_reader_that_does_not_read_is_cut_off():
    with Server(send_seconds=0.3) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        send_request(client, {**LONG, "stream": True, "n": 4, "logprobs": 128})
        until(lambda: any(line.get("error") == "slow_reader" for line in server.events()))
        until(lambda: server.host.ended == server.host.accepted == 4 and free(server))
        client.close()


def test_unread_outputs_are_bounded():
    from llmopt.runtime.engine.outputs import RequestOutput
    from llmopt.runtime.server.bridge import TokenStream

    aborted, ends = [], []
    loop = type("Loop", (), {"abort": lambda self, name: aborted.append(name)})()
    stream = TokenStream(None, loop, "a", 1, 3, lambda: ends.append(1))
    for i in range(10):
        stream.receive(RequestOutput("a", new_token_ids=(i,)), float(i))
    assert aborted == ["a"] and stream.overflowed and len(stream._pending) == 3
    stream.receive(RequestOutput("a", finish_reason="abort"), 11.0)
    assert stream.remaining == 0 and ends == [1] and stream._pending[-1].finished


def test_keys():
    with Server(api_keys=("right", "other"), admin_keys=("root",)) as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "right"},
            {"Authorization": "Bearer root"},
        ):
            status, answer, got = server.post(PATH, {"prompt": "x"}, **headers)
            assert (
                status == 401 and answer["error"]["code"] == "invalid_api_key" and got["www-authenticate"] == "Bearer"
            )
        assert (
            server.get("/v1/models")[0]
            == server.get("/metrics")[0]
            == server.post("/tokenize", {"prompt": "x"})[0]
            == 401
        )
        assert server.post(PATH, {"prompt": "x", "max_tokens": 1}, Authorization="bearer other")[0] == 200
        assert server.get("/health")[0] == server.get("/ready")[0] == server.get("/")[0] == 200
        assert server.post("/admin/reload", {}, Authorization="Bearer right")[0] == 401
        assert server.post("/admin/reload", {}, Authorization="Bearer root")[0] == 200


def test_other_hosts_are_refused_where_there_is_no_key():
    """A name that a stranger's page has rebound to 127.0.0.1."""
    with Server() as server:
        assert server.get("/v1/models", Host="evil.example")[0] == 403
        for name in ("localhost:1", "127.0.0.1", "[::1]:8000"):
            assert server.get("/v1/models", Host=name)[0] == 200


def test_bodies_are_bounded():
    with Server(max_body_bytes=2000) as server:
        status, answer, _ = server.post(PATH, {"prompt": "x" * 3000})
        assert status == 413 and answer["error"]["code"] == "body_too_large"
        connection = server.connect()
        headers = {"Content-Type": "application/json"}
        chunks = iter([b'{"prompt": "', *[b"x" * 500] * 8, b'"}'])
        connection.request("POST", PATH, chunks, headers, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()


def test_draining_lets_requests_finish():
    with Server() as server:
        server.gate.clear()
        thread, found = in_background(lambda: server.post(PATH, {**LONG, "max_tokens": 5}))
        until(lambda: server.host.accepted == 1)
        drained = in_background(lambda: server.call(server.host.drain(20)))
        until(lambda: server.host.state == "draining")
        assert server.get("/ready")[0] == 503 and server.get("/health")[0] == 200
        status, answer, headers = server.post(PATH, {"prompt": "x"})
        assert status == 503 and answer["error"]["code"] == "shutting_down" and headers["retry-after"]
        server.gate.set()
        thread.join()
        assert found[0][0] == 200 and found[0][1]["usage"]["completion_tokens"] == 5
        drained[0].join()


@pytest.mark.parametrize("stream", [False, True])
def test_draining_is_bounded(stream):
    with Server() as server:
        step = server.engine.runner.execute

        def slow(plan):
            time.sleep(0.02)
            return step(plan)

        server.engine.runner.execute = slow
        thread, found = in_background(lambda: server.post(PATH, {**LONG, "stream": stream}))
        until(lambda: server.host.accepted == 1)
        server.call(server.host.drain(0.1))
        thread.join()
        status, answer, _ = found[0]
        if stream:
            assert '"shutting_down"' in answer and answer.endswith("data: [DONE]\n\n")
        else:
            assert status == 503 and answer["error"]["code"] == "shutting_down"


class Fatal(BaseException):
    """Not an Exception: the engine cannot contain it."""


def crashing(number):
    """A loader whose first `number` models crash at their first step."""
    count = iter(range(1000))

    def load(source):
        bad = next(count) < number
        return fake_model(fault=(lambda row: Fatal("broken")) if bad else None)

    return load


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_fails_its_requests_and_restarts_once():
    with Server(crashing(1)) as server:
        status, answer, headers = server.post(PATH, LONG)
        assert status == 503 and answer["error"]["code"] == "engine_crashed" and headers["retry-after"]
        until(lambda: server.host.restarts == 1 and server.host.ready)
        assert server.post(PATH, {"prompt": "x", "max_tokens": 2})[0] == 200
        names = [line["event"] for line in server.events()]
        assert names.index("engine_crashed") < names.index("restarted")
        assert server.metrics()['llmopt:engine_restarts_total{model_name="tiny"}'] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_second_crash_is_final_until_a_reload():
    with Server(crashing(2), admin_keys=("root",)) as server:
        assert server.post(PATH, LONG)[0] == 503
        until(lambda: server.host.restarts == 1 and server.host.ready)
        assert server.post(PATH, LONG)[0] == 503
        until(lambda: server.host.state == "failed")
        assert server.get("/health")[0] == 503
        status, answer, _ = server.post(PATH, LONG)
        assert status == 503 and answer["error"]["code"] == "engine_failed"
        assert server.post("/admin/reload", {}, Authorization="Bearer root")[0] == 200
        assert server.get("/health")[0] == 200 and server.post(PATH, {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_stalled_engine_is_unhealthy_until_it_moves():
    with Server(stall_seconds=0.1) as server:
        server.gate.clear()
        thread, found = in_background(lambda: server.post(PATH, {**LONG, "max_tokens": 3}))
        until(lambda: server.get("/health")[0] == 503)
        assert server.get("/health")[1] == {"status": "stalled"} and server.get("/ready")[0] == 503
        assert server.post(PATH, LONG)[1]["error"]["code"] == "engine_stalled"
        server.gate.set()
        thread.join()
        assert found[0][0] == 200
        until(lambda: server.get("/health")[0] == 200)


def test_a_request_whose_step_fails_gets_a_500_and_the_rest_goes_on():
    def fault(row):
        return ValueError("the text of a request") if 13 in row.token_ids else None

    with Server(lambda source: fake_model(fault=fault)) as server:
        status, answer, headers = server.post(PATH, {"prompt": [13], "max_tokens": 2})
        assert status == 500 and headers["x-should-retry"] == "false"
        assert "the text of" not in json.dumps(answer) + server.log.getvalue()
        assert server.post(PATH, {"prompt": [14], "max_tokens": 2, "logit_bias": {"13": -100}})[0] == 200


def test_reload_drops_nothing():
    loaded = []

    def load(source):
        if source == "missing":
            raise RunError("there is no such folder", source)
        loaded.append(fake_model())
        loaded[-1].source = source or "first"
        return loaded[-1]

    with Server(load, admin_keys=("root",)) as server:
        admin = {"Authorization": "Bearer root"}
        server.post(PATH, {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        old = server.gate
        old.clear()
        thread, found = in_background(lambda: server.post(PATH, {**LONG, "max_tokens": 7}))
        until(lambda: server.host.accepted == 2)
        status, answer, _ = server.post("/admin/reload", {"model": "second"}, **admin)
        assert (status, answer["model"]) == (200, "second") and len(server.host.models) == 2
        assert server.post(PATH, {"prompt": "x", "max_tokens": 2, "ignore_eos": True})[0] == 200  # by the new one
        old.set()
        thread.join()
        assert found[0][0] == 200 and found[0][1]["usage"]["completion_tokens"] == 7
        until(lambda: len(server.host.models) == 1 and loaded[0].loop.engine.runner.closed)
        assert server.metrics()['llmopt:generation_tokens_total{model_name="tiny"}'] == 3 + 7 + 2
        status, answer, _ = server.post("/admin/reload", {"model": "missing"}, **admin)
        assert status == 400 and "not replaced" in answer["error"]["message"]
        assert server.post(PATH, {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_loading_server_answers_its_probes():
    gate = threading.Event()

    def load(source):
        assert gate.wait(WAIT)
        return fake_model()

    server = Server(load)

    starting = threading.Thread(target=server.__enter__)
    starting.start()
    until(lambda: hasattr(server, "server") and server.server.started)
    assert server.get("/health")[0] == 200 and server.get("/ready")[0] == 503
    status, answer, _ = server.post(PATH, LONG)
    assert status == 503 and answer["error"]["code"] == "loading"
    gate.set()
    starting.join()
    assert server.get("/ready")[0] == 200
    server.__exit__()


def test_sigterm_drains_and_the_server_ends(capfd):
    """In the main thread of this process, where signals arrive."""
    answers = []

    def client(url):
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
            send_request(connection, {**LONG, "max_tokens": 60})
            until(lambda: models[0].loop.engine.metrics().steps_total > 2)
            os.kill(os.getpid(), signal.SIGTERM)
            answers.append(connection.recv(100_000))

    def load(source):
        models.append(fake_model())
        step = models[0].loop.engine.runner.execute
        models[0].loop.engine.runner.execute = lambda plan: (time.sleep(0.005), step(plan))[1]
        return models[0]

    models, threads = [], []

    def ready(url):
        threads.append(threading.Thread(target=client, args=(url,)))
        threads[0].start()

    before = signal.getsignal(signal.SIGTERM)
    serve(load, ServerSettings(port=0, log_format="json"), "tiny", ready)
    threads[0].join()
    assert answers[0].startswith(b"HTTP/1.1 200 OK")
    assert signal.getsignal(signal.SIGTERM) is before and models[0].loop.engine.runner.closed
    names = [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()]
    assert names.index("ready") < names.index("stopping") < names.index("request") < names.index("stopped")


def test_a_model_that_does_not_load_ends_the_server():
    def load(source):
        raise RunError("the weights are damaged", "model")

    with pytest.raises(RunError, match="damaged"):
        serve(load, ServerSettings(port=0), "tiny")


def test_an_address_in_use_is_one_line():
    from llmopt.optimizer.errors import UsageError
    from llmopt.runtime.server.serve import bind

    with bind("127.0.0.1", 0) as first, pytest.raises(UsageError, match="cannot listen"):
        bind("127.0.0.1", first.getsockname()[1])
