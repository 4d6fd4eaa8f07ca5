"""Random traffic against a server for a while; at the end nothing may be left behind.

    python benchmarks/soak.py --minutes 20 [--model FOLDER] [--workers 12]

Traffic: completions, chats, streams read to the end, streams and answers abandoned at a random moment, readers that
stop reading, deadlines, schemas, many prompts at once, malformed bodies, reloads. Promises, each checked:

- no answer is a 500, and each is one that its request may get;
- when the traffic stops, every sequence that the engine took has ended once, all KV blocks are free, the event loop has
  as many tasks as before;
- memory is flat: the median RSS of the last quarter is at most 3% and 12 MiB above that of the second quarter;
- SIGTERM in the middle of traffic ends the process with exit code 0.

Without --model a tiny random model is served. Exits 1 where a promise is broken. `--output` writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serve_bodies import mutated
from serve_process import ServerProcess, tiny_model

ADMIN_KEY = "soak-admin"
TEXT = "the sky is blue and a river runs under old bridges where people sell bread every morning"
WORDS = TEXT.split()
LIMITS = ("--max-model-len", "1024", "--request-timeout", "60")
"""So that a body that lost its max_tokens does not keep a slow machine busy for longer than a client waits."""
MOST_GROWTH, MOST_BYTES = 0.03, 12 * 2**20
PAUSE = 0.05
"""Mean seconds between two scenarios of a worker."""
ENGINE = ("--set", "kv_cache_memory=67108864", "--set", "max_num_seqs=16")
OPTIONS = (*ENGINE, "--max-queue", "8", "--drain-timeout", "20", *LIMITS)


class Soak:
    """Workers that each play one random scenario after the other until `stop` is set."""

    def __init__(self, server: ServerProcess, seed: int, pause: float = PAUSE) -> None:
        self.server, self.seed, self.pause = server, seed, pause
        self.stop = threading.Event()
        self.ending = threading.Event()
        """The server has been told to end: refused connections are expected from then on."""
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.rss: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def work(self, number: int) -> None:
        rng = random.Random(f"{self.seed}-{number}")
        scenarios = [self.whole] * 4 + [self.stream] * 4 + [self.leave] * 4 + [self.malformed] * 3
        scenarios += [self.slow, self.deadline, self.schema, self.many, self.tokens]
        while not self.stop.is_set():
            scenario = rng.choice(scenarios)
            try:
                outcome = scenario(rng)
            except (OSError, ValueError, AssertionError) as error:
                if self.ending.is_set():
                    return
                outcome = "fault"
                self._fault(f"{scenario.__name__}: {error!r}")
            with self._lock:
                self.outcomes[f"{scenario.__name__} {outcome}"] += 1
            self.stop.wait(rng.expovariate(1 / self.pause))

    def _fault(self, text: str) -> None:
        with self._lock:
            self.faults.append(text)

    def _expect(self, status: int, answer: bytes, *allowed: int) -> str:
        allowed = (*allowed, 503) if self.ending.is_set() else allowed
        assert status in allowed, f"status {status}: {answer[:300]!r}"
        return str(status)

    # -- scenarios -----------------------------------------------------------------------------------------------

    def whole(self, rng: random.Random) -> str:
        status, answer = self.server.request("POST", "/v1/completions", completion(rng))
        return self._expect(status, answer, 200, 429)

    def stream(self, rng: random.Random) -> str:
        body = {**completion(rng), "stream": True, "stream_options": {"include_usage": True}}
        status, answer = self.server.request("POST", "/v1/completions", body)
        if status == 200 and not self.ending.is_set():
            assert answer.endswith(b"data: [DONE]\n\n") and b'"usage":{' in answer and b'"error"' not in answer, answer[
                -300:
            ]
        return self._expect(status, answer, 200, 429)

    def leave(self, rng: random.Random) -> str:
        """Go away at a random moment: before the answer, in its middle, or just after it."""
        body = {
            **completion(rng),
            "stream": rng.random() < 0.6,
            "max_tokens": rng.randrange(1, 200),
            "ignore_eos": True,
        }
        with self._raw(body) as client:
            end = time.monotonic() + rng.expovariate(4)
            while (left := end - time.monotonic()) > 0:
                client.settimeout(left)
                try:
                    if not client.recv(4096):
                        break
                except TimeoutError:
                    break
        return "left"

    def slow(self, rng: random.Random) -> str:
        """Take a little, then nothing for seconds, then go."""
        body = {**completion(rng), "stream": True, "n": 4, "logprobs": 50, "max_tokens": 150, "ignore_eos": True}
        with self._raw(body, receive_buffer=2048) as client:
            client.settimeout(30)
            client.recv(1024)
            self.stop.wait(rng.uniform(1, 6))
        return "left"

    def malformed(self, rng: random.Random) -> str:
        path, body, headers = mutated(rng)
        status, answer = self.server.request("POST", path, body, headers)
        return self._expect(status, answer, 200, 400, 404, 413, 429, 408)

    def deadline(self, rng: random.Random) -> str:
        body = {**completion(rng), "max_tokens": 300, "ignore_eos": True, "deadline": rng.uniform(0.001, 0.5)}
        status, answer = self.server.request("POST", "/v1/completions", body)
        return self._expect(status, answer, 200, 429, 408)

    def schema(self, rng: random.Random) -> str:
        properties = {rng.choice(WORDS): {"type": rng.choice(["integer", "boolean", "null"])}}
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body = {"messages": [{"role": "user", "content": "JSON"}], "response_format": form, "max_tokens": 40}
        status, answer = self.server.request("POST", "/v1/chat/completions", body)
        if status == 200 and json.loads(answer)["choices"][0]["finish_reason"] == "stop":
            json.loads(json.loads(answer)["choices"][0]["message"]["content"])
        return self._expect(status, answer, 200, 429)

    def many(self, rng: random.Random) -> str:
        body = {**completion(rng), "prompt": [text(rng) for _ in range(rng.randrange(2, 9))], "n": rng.choice([1, 2])}
        status, answer = self.server.request("POST", "/v1/completions", body)
        if status == 200:
            assert len(json.loads(answer)["choices"]) == len(body["prompt"]) * body["n"]
        return self._expect(status, answer, 200, 429)

    def tokens(self, rng: random.Random) -> str:
        status, answer = self.server.request("POST", "/tokenize", {"prompt": text(rng)})
        return self._expect(status, answer, 200)

    def _raw(self, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect((self.server.host, self.server.port))
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return client

    # -- watching ------------------------------------------------------------------------------------------------

    def watch(self, began: float, reload_every: float) -> None:
        """Sample memory; reload the model now and then."""
        reloaded = began
        while not self.stop.wait(2):
            try:
                self.rss.append((time.monotonic() - began, self.server.metrics()["process_resident_memory_bytes"]))
                if reload_every and time.monotonic() - reloaded > reload_every:
                    reloaded = time.monotonic()
                    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
                    status, answer = self.server.request("POST", "/admin/reload", {}, headers)
                    self._expect(status, answer, 200)
                    self.outcomes["reload 200"] += 1
            except (OSError, AssertionError) as error:
                if not self.ending.is_set():
                    self._fault(f"watch: {error!r}")


def completion(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": text(rng),
        "max_tokens": rng.randrange(1, 40),
        "temperature": rng.choice([0, 0.8, 1.5]),
    }
    if rng.random() < 0.3:
        body.update(seed=rng.randrange(100), stop=rng.choice(WORDS), presence_penalty=0.5, top_p=0.9)
    if rng.random() < 0.2:
        body.update(logprobs=3, n=2)
    return body


def text(rng: random.Random) -> str:
    shared = TEXT if rng.random() < 0.5 else ""  # prefixes that hit the cache
    return f"{shared} {' '.join(rng.choices(WORDS, k=rng.randrange(1, 40)))}"


def growth(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Median RSS in bytes of the second and of the last quarter of the time."""
    last = samples[-1][0]
    quarters = [[rss for when, rss in samples if last * i / 4 <= when <= last * (i + 1) / 4] for i in range(4)]
    return statistics.median(quarters[1]), statistics.median(quarters[3])


def is_flat(second: float, last: float) -> bool:
    return last <= second * (1 + MOST_GROWTH) + MOST_BYTES


def soak(
    server: ServerProcess, minutes: float, workers: int, seed: int, reload_every: float = 0, pause: float = PAUSE
) -> dict[str, Any]:
    """Drive the traffic, stop it, look; then SIGTERM in the middle of new traffic. The report has `broken`."""
    server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
    before = server.wait_idle()["server_tasks"]
    run, began = Soak(server, seed, pause), time.monotonic()
    threads = [threading.Thread(target=run.work, args=(i,)) for i in range(workers)]
    threads.append(threading.Thread(target=run.watch, args=(began, reload_every)))
    for thread in threads:
        thread.start()
    time.sleep(minutes * 60)
    run.stop.set()
    for thread in threads:
        thread.join()
    idle, end = server.wait_idle(), time.monotonic() + 70
    while (idle["server_tasks"] > before or idle["engine_models"] > 1) and time.monotonic() < end:
        time.sleep(0.5)
        idle = server.wait_idle()
    second, last = growth(run.rss)
    promises = {
        "no fault": not run.faults,
        "each sequence ended once": idle["sequences_accepted_total"] == idle["sequences_ended_total"],
        "all blocks free": idle["kv_blocks_free"] == idle["kv_blocks_total"],
        "no task left": idle["server_tasks"] <= before,
        "memory flat": is_flat(second, last) or bool(reload_every),
        "ends on SIGTERM": ends_on_sigterm(server, run, workers),
    }
    return {
        "minutes": minutes,
        "outcomes": dict(sorted(run.outcomes.items())),
        "sequences": idle["sequences_accepted_total"],
        "tokens": idle["generation_tokens_total"],
        "rss_second_quarter": second,
        "rss_last_quarter": last,
        "rss_samples": run.rss,
        "tasks": [before, idle["server_tasks"]],
        "faults": run.faults[:50],
        "broken": [name for name, held in promises.items() if not held],
    }


def ends_on_sigterm(server: ServerProcess, run: Soak, workers: int) -> bool:
    """Traffic again, SIGTERM in its middle: the process must drain and end with exit code 0."""
    run.stop.clear()
    threads = [threading.Thread(target=run.work, args=(1000 + i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    run.ending.set()
    code = server.terminate()
    run.stop.set()
    for thread in threads:
        thread.join()
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--model")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reload-every", type=float, default=0, help="Seconds; memory is then not held to be flat.")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "admin-keys"
        keys.write_text(ADMIN_KEY)
        model = arguments.model or tiny_model(Path(folder))
        with ServerProcess(model, "--admin-key-file", str(keys), *OPTIONS) as server:
            report = soak(server, arguments.minutes, arguments.workers, arguments.seed, arguments.reload_every)
            log = server.log_text()
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1))
    print(json.dumps({key: value for key, value in report.items() if key != "rss_samples"}, indent=1))
    if report["broken"]:
        print(log[-3000:], file=sys.stderr)
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
