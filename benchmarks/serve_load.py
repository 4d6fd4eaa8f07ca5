"""Servers of one model under rising load, side by side in one run: ours, llama.cpp's, vLLM's.

    python benchmarks/serve_load.py --model FOLDER --bf16-gguf FILE --int4 ARTIFACT --int4-gguf FILE \
        --llama-server BINARY --vllm BINARY --output out.json [--rounds 2] [--quick]

In every round each server is started, waited for, warmed up by as many requests as it may run at once, driven through
all rates with the requests of `llmopt bench serve` (evaluation/bench: random prompts of an exact length, full-length
greedy answers, Poisson arrivals rescaled to the rate), and stopped; the next round begins with another server. No two
servers run at once. Prompts and arrivals of a round and rate are the same for all servers, and new in every round, so
that no prefix cache answers. All servers have the same number of threads and of sequences at once; clients are not
held back, so what waits in a server's queue is in its TTFT. Speculation is off everywhere.

A cell pools the requests of all rounds: tokens and requests a second over the summed durations (from the first
request's sending to the last answer's end, so a rate that a server cannot hold shows as less), percentiles over all
requests. Goodput: requests a second that meet all objectives (`--goodput`). A server that is not set up, does not
start or fails stays in the table with the reason. `--quick` takes one round of 4 requests at two rates, to see that
everything runs.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serve_load_servers import Kind, Running, kinds

if TYPE_CHECKING:
    from llmopt.evaluation.bench.prompts import RandomPrompts
    from llmopt.evaluation.bench.run import Load

HEADER = ("server", "rate", "done", "failed", "out tok/s", "req/s", "TTFT p50", "p99", "TPOT p50", "p99",
          "E2E p99", "goodput", "others' CPU")  # fmt: skip


class Loads:
    """The load of a rate in a round, the same whenever it is asked for."""

    def __init__(self, prompts: RandomPrompts, args: argparse.Namespace) -> None:
        self._prompts, self._args = prompts, args
        self._made: dict[tuple[int, float | str], Load] = {}

    def count(self, rate: float) -> int:
        args = self._args
        return args.burst if math.isinf(rate) else max(args.least, round(rate * args.seconds))

    def make(self, number: int, rate: float) -> Load:
        return self._cached((number, rate), self.count(rate), rate)

    def warm_up(self, number: int) -> Load:
        """Everything that the server may run at once, so that no shape is met first while it is measured."""
        return self._cached((number, "warm"), min(self._args.concurrency, self._args.burst), math.inf)

    def _cached(self, key: tuple[int, float | str], count: int, rate: float) -> Load:
        from llmopt.evaluation.bench.arrivals import arrival_times
        from llmopt.evaluation.bench.lengths import Lengths
        from llmopt.evaluation.bench.run import Load

        if key not in self._made:
            seed = hash_of(key)
            sizes = [Lengths(size, size) for size in (self._args.input_len, self._args.output_len)]
            requests = self._prompts.make(count, *sizes, round_number=seed)
            self._made[key] = Load(requests, arrival_times(count, rate, seed=seed))
        return self._made[key]


def hash_of(key: tuple[int, float | str]) -> int:
    """A seed from a round and a rate; the same in every process."""
    import zlib

    return zlib.crc32(repr(key).encode())


def drive(kind: Kind, number: int, loads: Loads, args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """One server's turn in a round: `command`, `version`, `ready_s`, `runs` (rate → what was measured)."""
    from llmopt.evaluation.bench.metrics import parse_objectives
    from llmopt.evaluation.bench.server import Server
    from llmopt.evaluation.bench.session import one_round

    objectives = parse_objectives(args.goodput)
    with Running(kind, log, args.start_seconds) as running:
        target = Server(running.url, name=kind.name, timeout=args.timeout)
        target.open()
        found: dict[str, Any] = {"command": running.command, "version": running.version(), "ready_s": running.ready_s}
        warm = target.run(loads.warm_up(number))
        if not any(record.completed for record in warm.records):
            raise RuntimeError(f"the first requests failed: {warm.records[0].error}")
        found["runs"] = {}
        for rate in args.rates:
            found["runs"][rate] = one_round(target, loads.make(number, rate), number, objectives)
            shown = row_of(kind.name, rate, pooled([found["runs"][rate]], args))
            print(f"round {number + 1}: " + " | ".join(shown), file=sys.stderr, flush=True)
    return found


def pooled(rounds: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    from llmopt.evaluation.bench.metrics import parse_objectives
    from llmopt.evaluation.bench.session import summary

    return summary(rounds, parse_objectives(args.goodput))


def row_of(name: str, rate: float, result: dict[str, Any]) -> list[str]:
    """The cells of one row; latencies in milliseconds."""
    metrics = result["metrics"]

    def latency(which: str, key: str) -> str:
        known = metrics[f"{which}_ms"]
        return "–" if known is None else f"{known[key]:,.0f}" if known[key] >= 100 else f"{known[key]:.1f}"

    foreign = result["foreign_cpu"]
    return [
        name, f"{rate:g}", str(metrics["completed"]), str(metrics["failed"]), f"{metrics['output_throughput']:.0f}",
        f"{metrics['request_throughput']:.2f}", latency("ttft", "median"), latency("ttft", "p99"),
        latency("tpot", "median"), latency("tpot", "p99"), latency("e2el", "p99"),
        f"{metrics['request_goodput']:.2f}", "?" if foreign is None else f"{foreign:.1%}",
    ]  # fmt: skip


def measure(rows: list[Kind], loads: Loads, args: argparse.Namespace, logs: Path) -> dict[str, dict[str, Any]]:
    """All rounds. By row: `turns` (a dict a round, see `drive`) and `errors` (a text a round that failed)."""
    taken: dict[str, dict[str, Any]] = {row.name: {"turns": [], "errors": []} for row in rows}
    for number in range(args.rounds):
        turn = number % max(len(rows), 1)
        for row in [*rows[turn:], *rows[:turn]]:
            if (why := row.missing()) is None:
                try:
                    log = logs / f"{row.name.replace(' ', '-')}-{number + 1}.log"
                    taken[row.name]["turns"].append(drive(row, number, loads, args, log))
                    continue
                except Exception as error:  # one server's failure must not cost the others' figures
                    why = f"{type(error).__name__}: {error}"[:300]
            print(f"round {number + 1}: {row.name}: {why}", file=sys.stderr, flush=True)
            taken[row.name]["errors"].append(why)
    return taken


def report(rows: list[Kind], taken: dict[str, dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document: settings, servers, and by row and rate the pooled figures and each round's."""
    from llmopt.evaluation.bench.machine import about_machine

    servers, results = [], []
    for row in rows:
        turns = taken[row.name]["turns"]
        known = turns[0] if turns else {}
        servers.append(
            {
                "name": row.name, "group": row.group, "about": row.about, "version": known.get("version"),
                "command": shlex.join(known.get("command", row.command)), "env": row.env,
                "ready_s": [turn["ready_s"] for turn in turns], "errors": taken[row.name]["errors"],
            }
        )  # fmt: skip
        for rate in args.rates:
            runs = [turn["runs"][rate] for turn in turns]
            if runs:
                rounds = [{k: v for k, v in run.items() if k != "records"} for run in runs]
                found = {"server": row.name, "rate": f"{rate:g}", "summary": pooled(runs, args), "rounds": rounds}
                results.append(found)
    settings = {key: plain(value) for key, value in vars(args).items()}
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "settings": settings,
        "machine": {**about_machine(), "python": platform.python_version()}, "servers": servers, "results": results,
    }  # fmt: skip


def plain(value: Any) -> Any:
    """For JSON: paths and infinities as text."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) or value == math.inf else value


def table(rows: list[Kind], document: dict[str, Any], args: argparse.Namespace) -> str:
    """Markdown: a table a group, rates together, then what each server was."""
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        names = [row.name for row in rows if row.group == group]
        lines += [f"\n**{group}**\n", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
        for rate in args.rates:
            for one in document["results"]:
                if one["server"] in names and one["rate"] == f"{rate:g}":
                    lines.append("| " + " | ".join(row_of(one["server"], rate, one["summary"])) + " |")
    lines.append("\nLatencies in ms; rates in requests/s; goodput: requests/s with " + ", ".join(args.goodput) + ".\n")
    for server in document["servers"]:
        ready = ", ".join(f"{seconds:.1f}" for seconds in server["ready_s"])
        lines.append(f"- {server['name']}: {server['version']}; {server['about']}; ready after {ready or '–'} s")
        lines.append(f"  `{server['command']}`")
        lines += [f"  failed: {error}" for error in dict.fromkeys(server["errors"])]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", type=Path, help="Folder of the bf16 model, for ours and vLLM.")
    found.add_argument("--bf16-gguf", type=Path, help="The same model, from `llmopt export --format gguf`.")
    found.add_argument("--int4", type=Path, help="Our int4 artifact.")
    found.add_argument("--int4-options", nargs="*", default=["activation=int8", "lm_head=int4"],
                       metavar="NAME=VALUE", help="Options of llmopt.load for it.")  # fmt: skip
    found.add_argument("--int4-gguf", type=Path)
    found.add_argument("--llama-server", type=Path)
    found.add_argument("--vllm", type=Path)
    found.add_argument("--only", nargs="*", help="Parts of the names of the rows to take.")
    found.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 2, 4, 8, math.inf], help="inf: all at once.")
    found.add_argument("--seconds", type=float, default=20, help="Of arrivals at each rate.")
    found.add_argument("--least", type=int, default=10, help="Fewest requests at a rate.")
    found.add_argument("--burst", type=int, default=64, help="Requests at the rate inf.")
    found.add_argument("--rounds", type=int, default=2)
    found.add_argument("--input-len", type=int, default=128)
    found.add_argument("--output-len", type=int, default=64)
    found.add_argument("--concurrency", type=int, default=32, help="Sequences that a server runs at once.")
    found.add_argument("--context", type=int, default=512, help="Tokens of a sequence, at most.")
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--goodput", nargs="+", default=["ttft:1000", "tpot:50"], metavar="NAME:MS")
    found.add_argument("--start-seconds", type=float, default=900)
    found.add_argument("--timeout", type=float, default=300, help="Seconds that a stream may be silent.")
    found.add_argument("--quick", action="store_true")
    found.add_argument("--output", type=Path, help="JSON file; the tables go beside it as Markdown.")
    return found


def main() -> int:
    args = parser().parse_args()
    if args.quick:
        args.rates, args.rounds, args.least, args.seconds, args.burst = [1, math.inf], 1, 4, 1, 4
    rows = kinds(args)
    if not rows:
        parser().error("no server is named: give --model, --int4 or --int4-gguf, and the peers' binaries")
    from llmopt.evaluation.bench.prompts import RandomPrompts
    from llmopt.runtime.tokenizer_files import open_tokenizer

    loads = Loads(RandomPrompts(open_tokenizer(args.model or args.int4, False)), args)
    began = time.perf_counter()
    logs = Path(tempfile.mkdtemp(prefix="serve-load-"))
    taken = measure(rows, loads, args, logs)
    document = report(rows, taken, args)
    document["seconds"] = time.perf_counter() - began
    tables = table(rows, document, args)
    if args.output:
        args.output.write_text(json.dumps(document, indent=1))
        args.output.with_suffix(".md").write_text(tables + "\n")
    print(tables)
    print(f"\n{document['seconds'] / 60:.1f} minutes; logs in {logs}", file=sys.stderr)
    return 1 if any(one["errors"] for one in taken.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
