"""Load on servers: recorded streams against hand-computed values, a live server of the test's own, and its failures."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from llmopt.evaluation.bench import server as server_module
from llmopt.evaluation.bench.metrics import run_metrics
from llmopt.evaluation.bench.prompts import Request
from llmopt.evaluation.bench.records import RequestRecord
from llmopt.evaluation.bench.run import Load
from llmopt.evaluation.bench.server import Server, base_url, prometheus_sum
from llmopt.evaluation.bench.sse import EventStream
from llmopt.optimizer.errors import MissingDependency, RunError, UsageError

COMPLETIONS = [
    (0.120, {"choices": [{"text": "Hello", "finish_reason": None}]}),
    (0.150, {"choices": [{"text": "", "finish_reason": None}]}),  # a token that completes no character is content
    (0.210, {"choices": [{"text": " wor", "token_ids": [5, 6, 7], "finish_reason": None}]}),
    (0.211, {"choices": [{"text": "", "finish_reason": "length"}]}),
    (0.212, {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 5}}),
]
CHAT = [
    (0.010, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
    (0.100, {"choices": [{"delta": {"content": "Hi"}, "finish_reason": None}]}),
    (0.140, {"choices": [{"delta": {"content": "!"}, "finish_reason": None}]}),
    (
        0.141,
        {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 9, "completion_tokens": 3}},
    ),
]


def replay(events, sent=0.0):
    record = RequestRecord(0, sent, sent)
    for now, event in events:
        assert not server_module._note(record, json.dumps(event), now)
    return record


def test_a_recorded_completion():
    record = replay(COMPLETIONS, sent=0.020)
    assert record.completed and record.text == "Hello wor" and record.finish_reason == "length"
    assert (record.prompt_tokens, record.output_tokens, record.counted_by) == (12, 5, "usage")
    assert record.chunk_tokens == [None, None, 3]
    found = run_metrics([record], 1.0)
    assert found["ttft_ms"]["mean"] == pytest.approx(100)
    assert found["e2el_ms"]["mean"] == pytest.approx(191)
    assert found["tpot_ms"]["mean"] == pytest.approx(91 / 4)
    assert (found["itl_ms"]["min"], found["itl_ms"]["max"]) == pytest.approx((30, 60))
    assert found["output_throughput"] == 5.0 and found["total_token_throughput"] == 17.0


def test_a_recorded_chat_whose_opening_role_is_no_token():
    found = run_metrics([replay(CHAT)], 1.0)
    assert found["ttft_ms"]["mean"] == pytest.approx(100) and found["itl_ms"]["mean"] == pytest.approx(40)
    assert found["tpot_ms"]["mean"] == pytest.approx(41 / 2) and found["total_output"] == 3


def test_events_in_whatever_pieces_they_come():
    wire = ': ping\n\ndata: {"a": "ü"}\r\n\r\nid: 3\ndata:x\ndata: y\n\nevent: end\n\ndata: [DONE]'.encode()
    for size in range(1, len(wire) + 1):
        stream = EventStream()
        found = [data for i in range(0, len(wire), size) for data in stream.feed(wire[i : i + size])] + stream.close()
        assert found == ['{"a": "ü"}', "x\ny", "[DONE]"]


def test_urls():
    for url in (
        "http://h:1",
        "http://h:1/",
        "http://h:1/v1",
        "http://h:1/v1/completions",
        "http://h:1/v1/chat/completions",
    ):
        assert base_url(url) == "http://h:1"
    assert base_url("https://h/api/v1") == "https://h/api"
    for wrong in ("h:1", "ftp://h", "http://"):
        with pytest.raises(UsageError, match="URL"):
            base_url(wrong)


def test_prometheus_counters():
    text = '# TYPE vllm:x_total counter\nvllm:x_total{model="a b"} 3.0\nvllm:x_total{model="c"} 4.0\n'
    text += "x_total 5\ny_x_total 9\n"
    assert prometheus_sum(text, "x_total") == 12 and prometheus_sum("", "x_total") == 0


@pytest.fixture
def live():
    """A server with OpenAI's API; the prompt says how it behaves. Yields its URL and the bodies it got."""
    web = pytest.importorskip("aiohttp.web")
    bodies, drafted = [], [0]

    async def answer(http):
        body = await http.json()
        bodies.append((http.path, body))
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if prompt == "refuse":
            return web.json_response({"error": {"message": "no room"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        count = body["max_completion_tokens" if chat else "max_tokens"]
        send = lambda event: response.write(b"data: " + json.dumps(event).encode() + b"\n\n")  # noqa: E731
        if chat:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for number in range(0 if prompt == "nothing" else count):
            if prompt == "break" and number == 1:
                await send({"error": {"message": "it broke"}})
                return response
            if prompt == "cut" and number == 1:
                return response
            drafted[0] += 2
            piece = {"delta": {"content": "ab"}} if chat else {"text": "ab"}
            await send({"choices": [{**piece, "finish_reason": None}]})
            await asyncio.sleep(0.001)
        await send({"choices": [{**({"delta": {}} if chat else {"text": ""}), "finish_reason": "length"}]})
        if prompt != "uncounted" and body["stream_options"]["include_usage"]:
            await send({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": count}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def metrics(http):
        lines = [
            f"vllm:{name}_total {value}"
            for name, value in zip(server_module.COUNTERS, (drafted[0] // 2, drafted[0], drafted[0] // 2))
        ]
        return web.Response(text="\n".join(lines))

    async def models(http):
        return web.json_response({"data": [{"id": "tiny"}]})

    loop, ready, urls = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        app = web.Application()
        app.add_routes([web.post("/v1/completions", answer), web.post("/v1/chat/completions", answer)])
        app.add_routes([web.get("/metrics", metrics), web.get("/v1/models", models)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        ready.set()
        return runner

    def serve():
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(30)
    yield urls[0], bodies
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def opened(url, **more):
    found = Server(url, **more)
    found.open()
    return found


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_live_server(live, endpoint):
    url, bodies = live
    target = opened(url, endpoint=endpoint, keep=True)
    result = target.run(Load([Request("hi", 3), Request("ho", 5)], [0.0, 0.01]))
    for record, count in zip(result.records, (3, 5)):
        assert record.completed and record.output_tokens == count == len(record.chunk_times)
        assert record.counted_by == "usage" and record.prompt_tokens == 4 and record.text == "ab" * count
        assert record.planned <= record.sent < record.chunk_times[0] <= record.end <= result.duration
    assert result.speculation["num_draft_tokens"] == 16 and result.speculation["acceptance_rate"] == 0.5
    assert target.about()["model"] == "tiny" and {path for path, _ in bodies} == {
        "/v1/" + server_module.ENDPOINTS[endpoint]
    }
    body = bodies[0][1]
    assert body["stream"] and body["temperature"] == 0.0 and body["ignore_eos"] and "seed" not in body
    assert result.memory["rss_bytes"] is None or result.memory["rss_bytes"] > 0


def test_failures_of_a_live_server(live):
    url, _ = live
    prompts = ["refuse", "break", "cut", "nothing", "hi"]
    result = opened(url).run(Load([Request(p, 3) for p in prompts], [0.0] * 5, 2))
    errors = [record.error for record in result.records]
    assert "HTTP 503" in errors[0] and "no room" in errors[0]
    assert errors[1:4] == ["it broke", "the stream ended before the answer did", "no content came"]
    assert errors[4] is None and run_metrics(result.records, result.duration)["failed"] == 4


def test_tokens_that_the_server_does_not_count(live):
    url, _ = live
    load = Load([Request("uncounted", 3, prompt_len=7)], [0.0])
    [record] = opened(url).run(load).records
    assert (record.output_tokens, record.counted_by, record.prompt_tokens) == (3, "chunks", 7)
    [record] = opened(url, count=len).run(load).records
    assert (record.output_tokens, record.counted_by, record.text) == (6, "tokenizer", None)


def test_a_server_that_is_not_there():
    pytest.importorskip("aiohttp")
    with pytest.raises(RunError, match="cannot be reached"):
        opened("http://127.0.0.1:9")
    record = RequestRecord(0)
    with pytest.raises(ValueError):
        server_module._note(record, "not json", 0.1)


def test_chats_do_not_go_to_completions(live):
    url, _ = live
    chat = Request([{"role": "user", "content": "hi"}], 2)
    with pytest.raises(UsageError, match="--endpoint chat"):
        opened(url).run(Load([chat], [0.0]))
    [record] = opened(url, endpoint="chat").run(Load([chat], [0.0])).records
    assert record.completed


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "aiohttp", None)
    with pytest.raises(MissingDependency, match=r"llmopt\[bench\]"):
        Server("http://h")
