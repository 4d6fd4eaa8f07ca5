"""Sends mutated bodies to a server: every answer must be a proper one, none a 500, and the engine must live on.

    python benchmarks/serve_fuzz.py --count 10000 [--model FOLDER]

Without --model a tiny random model is served. Exits 1 where the promise does not hold.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serve_bodies import mutated
from serve_process import ServerProcess, tiny_model

ALLOWED = {200, 400, 404, 413, 429, 408}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or tiny_model(Path(folder))
        with ServerProcess(model, "--set", "kv_cache_memory=67108864", "--request-timeout", "60") as server:
            return run(server, arguments.count, arguments.seed, arguments.threads)


def run(server: ServerProcess, count: int, seed: int, threads: int) -> int:
    statuses: collections.Counter[int] = collections.Counter()
    faults: list[str] = []
    numbers = iter(range(count))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            path, body, headers = mutated(random.Random(f"{seed}-{number}"))
            try:
                status, answer = server.request("POST", path, body, headers)
                fault = check(status, answer)
            except Exception as error:
                status, fault = 0, f"no answer: {error!r}"
            with lock:
                statuses[status] += 1
                if fault:
                    faults.append(f"{number}: {path} {body[:300]!r}: {fault}")

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    idle = server.wait_idle()
    alive, text = server.request("POST", "/v1/completions", {"prompt": "The sky is", "max_tokens": 3})
    print(f"{count} bodies, statuses {dict(sorted(statuses.items()))}, afterwards {alive}: {text[:80].decode()}")
    print(f"blocks free {idle['kv_blocks_free']:.0f} of {idle['kv_blocks_total']:.0f}, {len(faults)} faults")
    print("\n".join(faults[:20]))
    code = server.terminate()
    held = idle["kv_blocks_free"] != idle["kv_blocks_total"]
    return 1 if faults or held or alive != 200 or code else 0


def check(status: int, answer: bytes) -> str:
    """What is wrong with an answer; empty where nothing is."""
    if status not in ALLOWED:
        return f"status {status}: {answer[:200]!r}"
    if status == 200:
        if b'"error"' in answer and b"data: " in answer:
            return f"an error inside a stream: {answer[-300:]!r}"
        return ""
    error = json.loads(answer).get("error", {})
    return "" if isinstance(error.get("message"), str) and error["message"] and "type" in error else "no proper error"


if __name__ == "__main__":
    sys.exit(main())
