"""Our quantization against its peers: the same model, calibration tokens, bits, groups and text, in one run.

    python benchmarks/quantization.py --model FOLDER --calibration calibration.txt --text wikitext2-raw-test.txt \\
        --peers FOLDER --output out.json [--only NAME,NAME] [--rows W4,W3] [--windows 20]

Every row is a job in a process of its own: ours is `llmopt optimize` with a recipe that only quantizes; a peer's is
`quantization_peers.py` in the peer's venv (`--peers` holds one for each: gptqmodel, llmcompressor, autoround, bnb; how
to make them is in `benchmarks/README.md`). All get the same token sequences. Reported:

    s        wall time of the quantizing call alone (ours: the pass)
    CPU s    of the process (a peer's: until its checkpoint was saved; ours: with the measurements and the proof)
    RSS      peak resident memory of the quantizing process, until the checkpoint was saved (ours: to its end; proof_mb
             in the JSON: of the process that proves the artifact)
    MB       weight files of the checkpoint
    ppl, KL, top-1   in float32 by plain transformers over the first `--windows` windows of 1,024 tokens; KL in nats
                     from the unquantized model

A row that is in the output already is not made again; `--redo` makes it again. Results are saved after each row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quantization_report

HERE = Path(__file__).parent


@dataclass
class Row:
    """One quantized model. `kind` is `llmopt` or one of the peers'; options: of the pass, or of the peer's method."""

    name: str
    kind: str
    bits: int
    group: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    passes: list[Any] = field(default_factory=list)
    self_samples: int = 0
    """Sequences that the model itself writes, beside those of the calibration text."""

    @property
    def grid(self) -> str:
        return f"W{self.bits} g{self.group}" if self.group > 0 else f"W{self.bits} channel"

    @property
    def key(self) -> str:
        return f"{self.grid}, {self.name}"


SOURCE = "unquantized"
BEST = {"method": "awq", "rounding": "gptq"}
LEARNED = {"learn_steps": 320, "batch_tokens": 1024}
OWN = 384
"""Sequences of the model's own text in the rows that say so."""


def ours(bits: int, group: int = 64) -> list[Row]:
    """The integer methods at one grid."""
    return [
        Row("llmopt rtn", "llmopt", bits, group, {"method": "rtn"}),
        Row("llmopt hqq", "llmopt", bits, group, {"method": "hqq"}),
        Row("llmopt gptq", "llmopt", bits, group, {"method": "gptq"}),
        Row("llmopt gptq, side by side", "llmopt", bits, group, {"method": "gptq", "true_sequential": False}),
        Row("llmopt awq", "llmopt", bits, group, {"method": "awq"}),
        Row("llmopt awq + gptq", "llmopt", bits, group, BEST),
        Row("llmopt awq + gptq, learned", "llmopt", bits, group, {**BEST, **LEARNED}),
        Row("llmopt awq + gptq, learned, own text", "llmopt", bits, group, {**BEST, **LEARNED}, self_samples=OWN),
    ]


def theirs(bits: int, group: int = 64) -> list[Row]:
    # its default order of activations is for groups alone
    plain = {"desc_act": False} | ({"act_group_aware": False} if group == -1 else {})
    return [
        Row("GPTQModel gptq", "gptqmodel", bits, group, plain),
        Row("GPTQModel gptq, desc_act", "gptqmodel", bits, group, {"desc_act": True}),
        Row("llm-compressor gptq", "llmcompressor", bits, group, {"method": "gptq", "actorder": "static"}),
        Row("llm-compressor awq", "llmcompressor", bits, group, {"method": "awq"}),
        Row("AutoRound", "autoround", bits, group, {}),
        Row("AutoRound, own text", "autoround", bits, group, {}, self_samples=OWN),
    ]


def rows() -> list[Row]:
    """Everything that can be asked for, in the table's order."""
    found = [*ours(4), *theirs(4), *ours(3), *theirs(3), *ours(2), *theirs(2)]
    found += [Row(f"llmopt {m}", "llmopt", 8, 64, {"method": m}) for m in ("rtn", "gptq")]
    for group in (32, 96, -1):
        for bits in (4, 3):
            found += [r for r in ours(bits, group) if r.name in ("llmopt rtn", "llmopt gptq", "llmopt awq + gptq")]
            found += [r for r in theirs(bits, group) if r.name == "GPTQModel gptq"]
    found += [
        Row("llmopt W8A8", "llmopt", 8, -1, {"method": "rtn", "activations": "int8"}),
        Row("llmopt smoothquant", "llmopt", 8, -1, {"method": "smoothquant"}),
        Row("llmopt fp8", "llmopt", 8, -1, {"method": "fp8"}),
        Row("llmopt mxfp4", "llmopt", 4, 32, {"method": "mxfp4"}),
        Row("llmopt nvfp4", "llmopt", 4, 16, {"method": "nvfp4"}),
        Row("llmopt bnb-nf4", "llmopt", 4, 64, {"method": "bnb-nf4"}),
        Row("bitsandbytes nf4", "bnb", 4, 64, {"bnb_4bit_use_double_quant": True}),
        # as many bytes as uniform W4 g64: 4 bits and a scale of 16 for 64
        Row("llmopt auto, 4.25 bits as stored", "llmopt", 4, 64, {"method": "auto", "auto": {"target_bits": 4.25}}),
        Row("llmopt auto, 4.0 bits as stored", "llmopt", 4, 64, {"method": "auto", "auto": {"target_bits": 4.0}}),
    ]
    return found


class Run:
    """The figures so far, saved after each row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.result: dict[str, Any] = {"about": about(), "rows": {}}
        if args.output.exists():
            self.result = json.loads(args.output.read_text())
        self.result["about"].setdefault("commands", []).append(shlex.join(["python", *map(short, sys.argv)]))

    def save(self) -> None:
        self.args.output.write_text(json.dumps(self.result, indent=1) + "\n")

    def tokens(self, row: Row) -> Path:
        """The calibration sequences that our pass sees, for the peers."""
        import transformers
        from llmopt.optimizer.calibration import Calibration
        from llmopt.optimizer.self_text import Continuations
        from llmopt.optimizer.sources import resolve

        path = self.work / f"tokens_{self.args.samples}_{row.self_samples}.json"
        if path.exists():
            return path
        further = None
        if row.self_samples:
            source = resolve(str(self.args.model))
            further = Continuations(source, seed=0, num_samples=row.self_samples, cache=self.work / "cache")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.args.model)
        found = Calibration(tokenizer, str(self.args.calibration), self.args.samples, self.args.length, further)
        path.write_text(json.dumps([batch[0].tolist() for batch in found.batches()]))
        return path

    def recipe(self, row: Row) -> Path:
        options = {"symmetric": True, **row.options}
        if options["method"] not in ("mxfp4", "nvfp4", "bnb-nf4", "fp8"):
            options |= {"bits": row.bits, "group_size": row.group}
        if options["method"] not in ("rtn", "hqq", "gptq", "awq"):
            options.pop("symmetric")
        if options["method"] == "auto":  # it chooses them
            options.pop("bits")
        recipe = {
            "calibration": {"text": str(self.args.calibration), "num_samples": self.args.samples,
                            "sequence_length": self.args.length, "self_samples": row.self_samples},
            "passes": [*row.passes, {"quantize": options}],
            "evaluate": {"windows": 1, "window_length": 64, "prompts": ["The"], "new_tokens": 1, "speed": False},
        }  # fmt: skip
        path = self.work / "recipe.yaml"
        path.write_text(json.dumps(recipe))
        return path

    def make(self, row: Row, out: Path) -> dict[str, Any]:
        """Quantize; seconds, CPU seconds, peak RSS and size. Raises RuntimeError where the process fails."""
        if row.kind == "llmopt":
            cache = self.work / "cache"
            shutil.rmtree(cache / "passes", ignore_errors=True)
            command = [sys.executable, "-m", "llmopt.optimizer.cli", "optimize", "-r", str(self.recipe(row)),
                       "-m", str(self.args.model), "-o", str(out)]  # fmt: skip
            env = {**os.environ, "LLMOPT_CACHE_DIR": str(cache)}
        else:
            job = {"model": str(self.args.model), "out": str(out), "tokens": str(self.tokens(row)), "bits": row.bits,
                   "group_size": row.group, "symmetric": True, "options": row.options}  # fmt: skip
            (self.work / "job.json").write_text(json.dumps(job))
            python = self.args.peers / row.kind / "bin/python"
            command = [str(python), str(HERE / "quantization_peers.py"), row.kind, str(self.work / "job.json")]
            env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        log = self.work / "log.txt"
        began = time.perf_counter()
        with log.open("w") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env, cwd=self.work)
            status, usage, peak = watch(process.pid)
        wall = time.perf_counter() - began
        if status:
            raise RuntimeError(" / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-500:])
        figures = {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": peak}
        if row.kind == "llmopt":
            manifest = json.loads((out / "llmopt.json").read_text())
            seconds = sum(step["seconds"] for step in manifest["passes"])
            size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
            return {**figures, "quantize_s": seconds, "bytes": size, "version": f"llmopt {about()['commit']}",
                    "proof_mb": manifest["measured"]["after"]["peak_rss_bytes"] / 1e6}  # fmt: skip
        return {**figures, **json.loads(log.read_text().strip().splitlines()[-1])}

    def evaluate(self, folders: dict[str, Path]) -> None:
        """Quality of rows by key, all in one go over the windows."""
        job = {"source": str(self.args.model), "text": str(self.args.text), "length": 1024,
               "windows": self.args.windows, "threads": self.args.threads,
               "students": [str(f) for f in folders.values()]}  # fmt: skip
        path = self.work / "eval.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, str(HERE / "quantization_eval.py"), str(path)]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        for key, line in zip(folders, found):
            quality = json.loads(line)
            quality.pop("student")
            self.result["rows"][key].setdefault("quality", {})[str(self.args.windows)] = quality
            print(f"{time.strftime('%H:%M:%S')} {key}: {quality}", flush=True)
        self.save()

    def go(self, chosen: list[Row]) -> None:
        done, windows = self.result["rows"], str(self.args.windows)
        waiting: dict[str, Path] = {}
        if windows not in done.setdefault(SOURCE, {"name": SOURCE}).get("quality", {}):
            waiting[SOURCE] = self.args.model
        for row in chosen:
            if not self.args.redo and windows in done.get(row.key, {}).get("quality", {}):
                continue
            out = self.work / "made" / row.key.replace(" ", "_").replace(",", "")
            shutil.rmtree(out, ignore_errors=True)
            out.parent.mkdir(exist_ok=True)
            print(f"{time.strftime('%H:%M:%S')} {row.key} …", flush=True)
            facts = {"name": row.name, "grid": row.grid, "kind": row.kind, "options": row.options}
            try:
                made = self.make(row, out)
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                done[row.key] = {**facts, "skipped": f"{type(error).__name__}: {error}"}
                print(f"  failed: {error}", flush=True)
                self.save()
                continue
            done[row.key] = {**facts, **made}
            self.save()
            print(f"  {made}", flush=True)
            waiting[row.key] = out
            if len(waiting) >= self.args.together:
                self.finish(waiting)
        self.finish(waiting)

    def finish(self, waiting: dict[str, Path]) -> None:
        """Evaluate what waits, and remove it unless it is to be kept."""
        if not waiting:
            return
        self.evaluate(waiting)
        if not self.args.keep:
            for key, folder in waiting.items():
                if key != SOURCE:
                    shutil.rmtree(folder)
        waiting.clear()


def watch(pid: int) -> tuple[int, resource.struct_rusage, float]:
    """Wait for a child: its status, what it and its own children used, and its own peak memory in 10^6 bytes."""
    peak = 0.0
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            peak = max([peak, *(int(x.split()[1]) * 1024 / 1e6 for x in lines if x.startswith("VmHWM"))])
        except OSError:
            pass  # it is gone
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return status, usage, peak
        time.sleep(0.1)


def short(argument: str) -> str:
    """A command line's argument without the folders of this machine."""
    return Path(argument).name if argument.startswith("/") else argument


def about() -> dict[str, Any]:
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "commit": commit,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of an unquantized model")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("quantization.json"))
    parser.add_argument("--work", type=Path, default=Path("quantization-work"), help="folder for what is made")
    parser.add_argument("--only", default="", help="rows by parts of their keys, separated by semicolons; $ is the end")
    parser.add_argument("--grid", default="", help="grids, such as `W4 g64;W3 g64`")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=20, help="0: the whole text")
    parser.add_argument("--threads", type=int, default=2, help="of the evaluation")
    parser.add_argument("--together", type=int, default=4, help="models evaluated in one go")
    parser.add_argument("--keep", action="store_true", help="keep what was made")
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the rows' keys")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    for name in ("model", "calibration", "text", "peers", "output", "work"):
        setattr(args, name, getattr(args, name).absolute())  # peers leave logs where they run: that is `--work`
    chosen = [
        row
        for row in rows()
        if (not args.grid or row.grid in args.grid.split(";"))
        and (not args.only or any(part in f"{row.key}$" for part in args.only.split(";")))
    ]
    if args.list:
        print("\n".join(row.key for row in chosen))
        return
    run = Run(args)
    try:
        run.go(chosen)
    finally:
        run.save()
        args.output.with_suffix(".md").write_text(quantization_report.markdown(run.result))
    print(quantization_report.markdown(run.result))


if __name__ == "__main__":
    main()
