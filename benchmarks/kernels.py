"""Step times of the fused decoder by weight format, number of rows and context, with the profile of a step by part.

    python benchmarks/kernels.py --model DIR [--formats bf16,int8,int4] [--threads 2] [--quick] [--markdown FILE]

Formats: `bf16` as stored; `int8` W8A8, one scale a row; `int4` symmetric round-to-nearest in groups of `--group`, int4
head, int8 activations; `int4-exact` the same weights with bfloat16 activations. Rounds over the formats are interleaved
and a cell shows the best of all rounds, with the median behind it, since neighbours of the machine only ever add time.
Foreign load is printed beside the table.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from llmopt.runtime.kernels.decoder import LINEARS, FusedDecoder, StepArrays, build_decoder
from llmopt.runtime.kernels.linear import quantize_rows
from llmopt.runtime.kernels.native import instruction_set
from torch import nn

BLOCK_SIZE = 32


class RoundedLinear(nn.Module):
    """A linear layer of round-to-nearest codes, with the packed layers' protocol; it cannot run by itself."""

    def __init__(self, linear: nn.Linear, bits: int, group_size: int) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.bias, self.bits, self.group_size, self.g_idx = linear.bias, bits, group_size, None
        self.codes, self.scales, self.zeros = quantize_rows(linear.weight, bits=bits, group_size=group_size)

    def quant_state(self) -> RoundedLinear:
        return self


def load(path: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def build(path: str, name: str, group: int) -> FusedDecoder:
    model: Any = load(path)
    if name == "bf16":
        return build_decoder(model)
    if name == "int8":
        return build_decoder(model, activation="int8", weights="int8", lm_head="int8")
    if name not in ("int4", "int4-exact"):
        raise SystemExit(f"unknown format {name!r}")
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for leaf, module in list(parent.named_children()):
                if type(module) is nn.Linear:
                    setattr(parent, leaf, RoundedLinear(module, 4, group))
    activation = "none" if name == "int4-exact" else "int8"
    return build_decoder(model, activation=activation, lm_head="int4", prove=False)


def step(decoder: FusedDecoder, rows: list[tuple[int, int]], logits: str = "last") -> tuple[StepArrays, torch.Tensor]:
    """Arguments of a step with (new tokens, context before them) a row, and a buffer for its logits."""
    ids, positions, slots, starts, lengths, tables, wanted = [], [], [], [0], [], [], []
    block = 0
    width = max(-(-(n + before) // BLOCK_SIZE) for n, before in rows)
    generator = torch.Generator().manual_seed(0)
    for n, before in rows:
        blocks = list(range(block, block + -(-(n + before) // BLOCK_SIZE)))
        block += len(blocks)
        for position in range(before, before + n):
            ids.append(int(torch.randint(0, decoder.vocab_size, (1,), generator=generator)))
            positions.append(position)
            slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(starts[-1] + n)
        wanted.append(starts[-1] - 1)
        lengths.append(before + n)
        tables.append(blocks + [0] * (width - len(blocks)))
    arrays = tuple(torch.tensor(a, dtype=torch.int32) for a in (ids, positions, slots, starts, lengths, tables, wanted))
    return cast("StepArrays", arrays), torch.empty(len(wanted), decoder.vocab_size)


def blocks_needed(rows: list[tuple[int, int]]) -> int:
    return sum(-(-(n + before) // BLOCK_SIZE) for n, before in rows)


def flops(decoder: FusedDecoder, rows: list[tuple[int, int]]) -> float:
    """Multiply-adds times two of linears, head and attention."""
    s = decoder.structure
    parts = [getattr(layer, name) for layer in s.layers for name in LINEARS]
    per_token = sum((part.rows or part.module.out_features) * part.module.in_features for part in parts)
    tokens = sum(n for n, _ in rows)
    pairs = sum(n * before + n * (n + 1) // 2 for n, before in rows)
    attention = 2 * pairs * s.heads * s.head_dim * len(s.layers)
    return 2.0 * (tokens * per_token + len(rows) * s.vocab * s.hidden + attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--formats", default="bf16,int8,int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="decode at 1 and 32 rows and prefill only")
    parser.add_argument("--realtime", type=int, default=0, help="SCHED_FIFO priority in the timed bursts (a privilege)")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = options.formats.split(",")
    cases = {
        f"decode {r} row{'s' * (r > 1)}, context {c}": [(1, c)] * r for r in (1, 8, 32) for c in (32, 128, 512, 2048)
    }
    cases["prefill 512"] = [(512, 0)]
    if options.quick:
        kept = ("decode 1 row, context 128", "decode 32 rows, context 128", "prefill 512")
        cases = {case: cases[case] for case in kept}
    decoders = {}
    for name in names:
        began = time.perf_counter()
        decoders[name] = build(options.model, name, options.group)
        decoders[name].allocate_kv(max(blocks_needed(rows) for rows in cases.values()), BLOCK_SIZE)
        print(
            f"{name}: built in {time.perf_counter() - began:.1f} s, {decoders[name].weight_bytes / 1e6:.0f} MB packed"
        )
    times: dict[tuple[str, str], list[float]] = {(case, name): [] for case in cases for name in names}
    for decoder in decoders.values():
        decoder.forward(*step(decoder, [(1, 1)])[0])  # starts the threads
    cpu, began = os.times(), time.perf_counter()
    idle = idle_seconds()
    for _ in range(options.rounds):
        for case, rows in cases.items():
            for name in names:
                arrays, out = step(decoders[name], rows)
                with priority(options.realtime):
                    stop = time.perf_counter() + options.seconds / options.rounds
                    while True:
                        start = time.perf_counter()
                        decoders[name].forward(*arrays, out=out)
                        times[case, name].append(time.perf_counter() - start)
                        if time.perf_counter() > stop:
                            break
    wall, used = time.perf_counter() - began, sum(os.times()[:2]) - sum(cpu[:2])
    foreign = max(0.0, wall * (os.cpu_count() or 1) - (idle_seconds() - idle) - used) / wall
    lines = [f"| step | {' | '.join(f'{n} ms (median) | tok/s | GB/s | GFLOP/s' for n in names)} |",
             "|---" * (1 + 4 * len(names)) + "|"]  # fmt: skip
    for case, rows in cases.items():
        cells = []
        for name in names:
            best, tokens = min(times[case, name]), sum(n for n, _ in rows)
            median, work = statistics.median(times[case, name]), flops(decoders[name], rows)
            cells.append(f"{best * 1e3:.2f} ({median * 1e3:.2f}) | {tokens / best:,.0f}")
            cells.append(f"{decoders[name].weight_bytes / best * 1e-9:.0f} | {work / best * 1e-9:,.0f}")
        lines.append(f"| {case} | {' | '.join(cells)} |")
    lines.append("")
    for case, rows in cases.items():
        for name in names:
            if "context 128" not in case and "prefill" not in case:
                continue
            decoder = decoders[name]
            arrays, out = step(decoder, rows)
            decoder.profile(True)
            least: dict[str, float] = {}
            with priority(options.realtime):
                for _ in range(20 if len(rows) == 1 and rows[0][0] == 1 else 3):
                    decoder.forward(*arrays, out=out)
                    for part, seconds in decoder.profile(True).items():
                        least[part] = min(least.get(part, 1e9), seconds)
            decoder.profile(False)
            parts = ", ".join(f"{part} {s * 1e3:.2f}" for part, s in least.items())
            lines.append(f"{case}, {name}: {parts} ms  ")
    import transformers

    names = (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x)
    cpu_name = next(names, "?")
    lines.append("")
    mode = ", SCHED_FIFO" if options.realtime else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    lines.append(f"{cpu_name}, {options.threads} threads{mode}, {instruction_set()}, group {options.group}, {versions}")
    lines.append(f"foreign load {foreign:.2f} cores on average")
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


@contextmanager
def priority(realtime: int) -> Iterator[None]:
    """Every thread of this process at a real-time priority (0: none), so that neighbours do not run in between."""
    threads = [int(name) for name in os.listdir("/proc/self/task")] if realtime else []
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(realtime))
    try:
        yield
    finally:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def idle_seconds() -> float:
    """Idle seconds of all cores together since boot (Linux; 0 elsewhere)."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
        return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


if __name__ == "__main__":
    main()
