"""What a server does beyond its capacity: Poisson arrivals at rising rates, accepted and refused requests apart.

    llmopt serve FOLDER --port 8000 --max-queue 8 --set max_num_seqs=8 &
    python benchmarks/serve_overload.py http://127.0.0.1:8000 --rates 1,2,4,8,16 --seconds 20

All requests come from one address, so the queue is first come, first served. It is bounded, and with it the latency of
what is accepted: beyond saturation that stops growing with the rate, refusals grow instead. Times are from sending the
request, streams are read to their end. TTFT: to the first chunk with text.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import time
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass
class Sample:
    status: int
    first: float | None
    whole: float
    tokens: int


async def ask(host: str, port: int, body: bytes) -> Sample:
    """One streamed completion over a connection of its own."""
    began, first, tokens, raw = time.perf_counter(), None, 0, b""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = int((await reader.readline()).split()[1])
    while line := await reader.readline():
        if first is None and b'"text":"' in line and b'"text":""' not in line:
            first = time.perf_counter() - began
        raw = line if b'"usage":{' in line else raw
    writer.close()
    if raw:
        tokens = json.loads(raw.partition(b"data: ")[2])["usage"]["completion_tokens"]
    return Sample(status, first, time.perf_counter() - began, tokens)


async def at_rate(url: str, rate: float, seconds: float, prompt: int, output: int, seed: int) -> list[Sample]:
    """All samples of a run: arrivals stop after `seconds`, what was accepted is waited for."""
    rng, target = random.Random(seed), urlsplit(url)
    tasks, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        ids = [rng.randrange(100, 20_000) for _ in range(prompt)]
        options = {"max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": True}
        body = json.dumps({"prompt": ids, **options, "stream_options": {"include_usage": True}}).encode()
        tasks.append(asyncio.create_task(ask(target.hostname or "", target.port or 80, body)))
        await asyncio.sleep(rng.expovariate(rate))
    return await asyncio.gather(*tasks)


def percentile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--rates", default="1,2,4,8,16", help="Requests a second.")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--prompt", type=int, default=64, help="Tokens.")
    parser.add_argument("--output", type=int, default=32, help="Tokens.")
    arguments = parser.parse_args()
    print("| rate | sent | 200 | 429 | others | tok/s | TTFT p50 | p99 | E2E p50 | p99 |\n|" + "---|" * 10)
    for number, rate in enumerate(float(rate) for rate in arguments.rates.split(",")):
        began = time.perf_counter()
        sizes = (arguments.prompt, arguments.output)
        samples = asyncio.run(at_rate(arguments.url, rate, arguments.seconds, *sizes, seed=number))
        seconds = time.perf_counter() - began
        counts = collections.Counter(sample.status for sample in samples)
        good = [sample for sample in samples if sample.status == 200]
        first, whole = [s.first for s in good if s.first is not None], [s.whole for s in good]
        others = len(samples) - counts[200] - counts[429]
        times = " | ".join(f"{percentile(v, q):.2f}" for v in (first, whole) for q in (0.5, 0.99))
        speed = sum(sample.tokens for sample in good) / seconds
        print(
            f"| {rate:g} | {len(samples)} | {counts[200]} | {counts[429]} | {others} | {speed:.0f} | {times} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
