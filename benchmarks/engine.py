"""Our engine against its peers on one machine: speed, memory and load time, all in one run.

    python benchmarks/engine.py --model FOLDER --int4 ARTIFACT --int8 ARTIFACT --peers FOLDER --output out.json

`--peers` holds a venv for each peer and the models made for them (`benchmarks/README.md` says how). One worker process
(`engine_peers.py`) per system; a worker is stopped (SIGSTOP) while another is measured, rounds go over the systems in
turn, and a cell is the median of the rounds. What is measured, greedy with end-of-text ignored, every prompt new:

    decode   one request: (time of 32 prompt + 128 new tokens - time of 32 + 1) / 127
    prefill  one request of 512 prompt tokens and 1 new: 512 / time
    batch    32 requests of 16–256 prompt tokens, 64 new each, given at once: new tokens / time
    prefix   the same behind a shared prefix of 512 tokens, new in every round
    RSS      peak resident memory (VmHWM) of the system's processes after decode and prefill / after the batches
    load     start of the process to being ready, and to the first token of a first prompt of 32

Foreign CPU: the share of the machine's cores that neither this process nor its workers used while a figure was taken.
A figure waits for a quiet moment and is taken again, with new prompts, where that share was above `--quiet`.
A system that does not start, or a measure it fails, stays in the table with its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_report

HERE = Path(__file__).parent
MEASURES = ("decode", "prefill", "batch", "prefix")
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip

KV = {"kv_cache_memory": 256 * 2**20}
"""Options of all our rows: a pool that holds the work here, 11,000 tokens; the default is 1 GiB."""


@dataclass
class System:
    """One row of the table."""

    name: str
    kind: str
    model: Path
    python: Path
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def systems(args: argparse.Namespace) -> list[System]:
    """Every row, in the table's order; what is missing on disk is found out at the start."""
    own, peers = Path(sys.executable), args.peers
    int8 = {"activation": "int8"}
    return [
        System("llmopt, bf16 source", "llmopt", args.model, own),
        System("llmopt, bf16 source, float32 between layers", "llmopt", args.model, own, {"rounding": "none"}),
        System("llmopt, int8 weights, activations and head, made at load", "llmopt", args.model, own,
               {"weights": "int8", "lm_head": "int8", **int8}),
        System("llmopt, int8 artifact, int8 activations and head", "llmopt", args.int8, own,
               {"lm_head": "int8", **int8}),
        System("llmopt, int4-flash artifact as it is (bf16 activations and head)", "llmopt", args.int4, own),
        System("llmopt, int4-flash artifact, int8 activations, int4 head", "llmopt", args.int4, own,
               {"lm_head": "int4", **int8}),
        System("llama.cpp, Q4_0, int4 head", "llamacpp", peers / "models/smollm2-q4_0.gguf", own,
               {"server": str(peers / "llamacpp/bin/llama-server")}),
        System("onnxruntime-genai, int4", "ortgenai", peers / "models/ort-int4", peers / "ortgenai/bin/python"),
        System("openvino-genai, int4", "openvino", peers / "models/ov-int4", peers / "openvino/bin/python"),
        System("openvino-genai, int8", "openvino", peers / "models/ov-int8", peers / "openvino/bin/python"),
        System("vllm-cpu, bf16", "vllm", args.model, peers / "vllm/bin/python", {}, VLLM),
        System("vllm-cpu, W8A8", "vllm", peers / "models/w8a8", peers / "vllm/bin/python", {}, VLLM),
        System("transformers generate, bf16", "transformers", args.model, own),
    ]  # fmt: skip


class Worker:
    """A system's process, in a process group of its own. Raises RuntimeError where it does not start."""

    def __init__(self, system: System, log: Path) -> None:
        for path in (system.python, system.model, Path(system.options.get("server", system.python))):
            if not path.exists():
                raise RuntimeError(f"not set up: no {path.parent.name}/{path.name}")
        options = {**KV, **system.options} if system.kind == "llmopt" else system.options
        given = json.dumps({"model": str(system.model), "options": options})
        self.log = log.open("w")
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [str(system.python), str(HERE / "engine_peers.py"), system.kind, given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "2", **system.env},
        )  # fmt: skip
        try:
            self.about = self._read()["about"]
        except RuntimeError:
            self.close()
            raise
        self.load_s = time.perf_counter() - self.began
        self.prompts = random.Random(system.name)

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            lines = [x for x in Path(self.log.name).read_text(errors="replace").splitlines() if x.strip()]
            raise RuntimeError(f"ended: {lines[-1][-200:] if lines else 'without a word'}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, prompts: list[list[int]], new: int, batch: bool = False, do: str = "generate") -> dict[str, Any]:
        message = {"do": do, "prompts": prompts, "new": new, "batch": batch}
        self.process.stdin.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        answer = self._read()
        if any(len(tokens) != new for tokens in answer.get("tokens", ())):
            raise RuntimeError(f"gave {sorted({len(t) for t in answer['tokens']})} new tokens, not {new}")
        return answer

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def pids(self) -> list[int]:
        """The processes of the worker's group."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == self.process.pid:
                    found.append(int(stat.parent.name))
            except (OSError, IndexError):
                continue
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.signal(signal.SIGCONT)
            self.process.stdin.close()  # type: ignore[union-attr]
            self.process.wait(20)
        with contextlib.suppress(OSError):
            self.signal(signal.SIGKILL)
        self.process.wait()


def jiffies(pids: list[int]) -> tuple[float, float]:
    """Ticks that the machine was busy (idle and I/O wait left out), and ticks that these processes used."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    own = 0
    for pid in pids:
        try:
            own += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
        except OSError:
            continue
    return sum(fields) - fields[3] - fields[4], own


def peak_mib(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                total += int(line.split()[1])
    return total / 1024


class Prompts:
    """Prompts of every round, the same for all systems: windows of a text's tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def make(self, what: str, number: int, length: int) -> list[int]:
        start = random.Random(f"{what} {number}").randrange(len(self.tokens) - length)
        return self.tokens[start : start + length]

    def batch(self, what: str, number: int, count: int) -> list[list[int]]:
        lengths = [16 + 240 * i // max(1, count - 1) for i in range(count)]
        random.Random(number).shuffle(lengths)
        shared = self.make(f"{what} prefix", number, 512) if what == "prefix" else []
        return [shared + self.make(f"{what} {i}", number, n) for i, n in enumerate(lengths)]


def measure(worker: Worker, what: str, number: int, prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    """One figure, with the tokens given and the processes whose memory counts."""
    if what == "decode":
        long = worker.ask([prompts.make("decode", number, 32)], args.decode)
        once = [worker.ask([prompts.make(f"first {i}", number, 32)], 1)["seconds"] for i in range(3)]
        seconds = long["seconds"] - statistics.median(once)
        return {"value": (args.decode - 1) / seconds, "tokens": long["tokens"], "pids": long["pids"]}
    if what == "prefill":
        found = [worker.ask([prompts.make(f"prefill {i}", number, 512)], 1) for i in range(3)]
        seconds = statistics.median(one["seconds"] for one in found)
        return {"value": 512 / seconds, "tokens": found[0]["tokens"], "pids": found[0]["pids"]}
    one = worker.ask(prompts.batch(what, number, args.requests), args.new, batch=True)
    return {"value": args.requests * args.new / one["seconds"], "tokens": one["tokens"], "pids": one["pids"]}


class Run:
    """The figures so far, saved after each."""

    def __init__(self, args: argparse.Namespace, prompts: Prompts) -> None:
        self.args, self.prompts = args, prompts
        self.result: dict[str, Any] = {"about": about(), "systems": {}, "figures": []}
        if args.append and args.output.exists():
            self.result = json.loads(args.output.read_text())
        self.result["about"].setdefault("commands", []).append(shlex.join(["python", *map(short, sys.argv)]))

    def add(self, system: System, what: str, **more: Any) -> None:
        self.result["figures"].append({"system": system.name, "what": what, **more})
        said = {k: v if isinstance(v, str) else round(v, 3) for k, v in more.items() if isinstance(v, (str, float))}
        print(f"{time.strftime('%H:%M:%S')} {system.name}: {what} {said}", flush=True)
        self.args.output.write_text(json.dumps(self.result, indent=1) + "\n")

    def start(self, system: System) -> Worker | None:
        """Start it, more than once if that is quick, for the load time; the last one stays, stopped."""
        for number in range(self.args.loads):
            before = jiffies([os.getpid()])
            try:
                worker = Worker(system, self.args.output.with_suffix(f".{system.kind}.log"))
                worker.ask([self.prompts.make("start", number, 32)], 1)
            except RuntimeError as error:
                self.add(system, "load", skipped=str(error).replace("\n", " "))
                return None
            first = time.perf_counter() - worker.began
            share = foreign(before, jiffies([os.getpid(), *worker.pids()]), first)
            self.result["systems"][system.name] = {"options": system.options, **worker.about}
            self.add(system, "load", value=worker.load_s, first_token_s=first, foreign=share)
            if (first > 15 and system.kind == "vllm") or number == self.args.loads - 1:
                worker.ask([self.prompts.make("warm", i, 16) for i in range(2)], 4, batch=True)
                worker.signal(signal.SIGSTOP)
                return worker
            worker.close()
        return None

    def figure(self, system: System, worker: Worker, what: str, number: int) -> None:
        """Take it in a quiet moment if one comes; where neighbours came in between, again with new prompts."""
        best: dict[str, Any] = {}
        if any(f.get("wall_s", 0) > self.args.slow for f in engine_report.figures(self.result, system.name, what)):
            return
        for attempt in range(self.args.tries):
            self.wait()
            worker.signal(signal.SIGCONT)
            pids = [os.getpid(), *worker.pids()]
            before, began = jiffies(pids), time.perf_counter()
            try:
                found = measure(worker, what, number + 100 * attempt, self.prompts, self.args)
                wall = time.perf_counter() - began
                share = foreign(before, jiffies(pids), wall)
                mib = peak_mib(found.pop("pids") or pids[1:])
            except RuntimeError as error:
                self.add(system, what, round=number, skipped=str(error))
                worker.signal(signal.SIGSTOP)
                return
            worker.signal(signal.SIGSTOP)
            if not best or share < best["foreign"]:
                best = {"foreign": share, "attempt": attempt, "peak_mib": mib, "wall_s": wall, **found}
            if share <= self.args.quiet or wall > self.args.slow:
                break
        self.add(system, what, round=number, **best)

    def wait(self) -> None:
        """Until the machine is quiet for a fifth of a second, `--patience` seconds at most."""
        until = time.monotonic() + self.args.patience
        while time.monotonic() < until:
            before, began = jiffies([os.getpid()]), time.perf_counter()
            time.sleep(0.2)
            if foreign(before, jiffies([os.getpid()]), time.perf_counter() - began) <= self.args.quiet:
                return

    def profile(self, system: System, worker: Worker) -> None:
        worker.signal(signal.SIGCONT)
        cases = {"decode": ([self.prompts.make("profile", 0, 32)], self.args.decode),
                 "prefill": ([self.prompts.make("profile", 1, 512)], 1),
                 "batch": (self.prompts.batch("batch", 99, self.args.requests), self.args.new)}  # fmt: skip
        for what, (prompts, new) in cases.items():
            parts = worker.ask(prompts, new, batch=what == "batch", do="profile")["profile"]
            self.add(system, f"profile of {what}", parts=parts)
        worker.signal(signal.SIGSTOP)


def foreign(before: tuple[float, float], after: tuple[float, float], wall: float) -> float:
    ticks = wall * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
    return max(0.0, (after[0] - before[0] - (after[1] - before[1])) / ticks)


def short(argument: str) -> str:
    """A command line's argument without the folders of this machine."""
    return Path(argument).name if argument.startswith("/") else argument


def about() -> dict[str, Any]:
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return {
        "cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform(),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "scheduling": {0: "normal", 1: "SCHED_FIFO", 2: "SCHED_RR"}.get(os.sched_getscheduler(0), "other"),
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M in bf16")
    parser.add_argument("--int4", type=Path, required=True, help="artifact of the recipe int4-flash")
    parser.add_argument("--int8", type=Path, required=True, help="artifact of the recipe int8")
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=HERE.parent / "data/evaluation.txt", help="text of the prompts")
    parser.add_argument("--output", type=Path, default=Path("engine.json"))
    parser.add_argument("--append", action="store_true", help="add to the figures of an earlier piece of the run")
    parser.add_argument("--only", default="", help="systems whose name has one of these, comma-separated")
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=int, default=3, help="starts of a system that starts quickly")
    parser.add_argument("--quiet", type=float, default=0.05, help="foreign CPU share that a figure may have")
    parser.add_argument("--tries", type=int, default=3, help="for a figure with more; the quietest counts")
    parser.add_argument("--slow", type=float, default=60, help="a figure that took more seconds is taken in one round")
    parser.add_argument("--patience", type=float, default=5, help="seconds to wait for a quiet moment")
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="also the parts of our steps")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(args.model / "tokenizer.json")).encode(args.text.read_text()[:2_000_000]).ids
    run = Run(args, Prompts(tokens))
    chosen = [s for s in systems(args) if not args.only or any(part in s.name for part in args.only.split(","))]
    workers: list[tuple[System, Worker]] = []
    try:
        for system in chosen:
            if (worker := run.start(system)) is not None:
                workers.append((system, worker))
        chosen_measures = args.measures.split(",")
        for group in ([m for m in chosen_measures if m != "prefix"], [m for m in chosen_measures if m == "prefix"]):
            for number in range(args.rounds):
                for what in group:
                    for system, worker in workers:
                        run.figure(system, worker, what, number)
        if args.profile:
            for system, worker in workers:
                if system.kind == "llmopt":
                    run.profile(system, worker)
    finally:
        for _, worker in workers:
            worker.close()
    text = engine_report.markdown(run.result)
    args.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
