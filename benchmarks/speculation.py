"""Speculative decoding by kind of draft, batch size and task, beside plain decoding, transformers and llama.cpp.

    python benchmarks/speculation.py --model FOLDER INT4 --draft INT4 --layers 0,1,2 --text wikitext2-raw-test.txt \
        --output speculation.json --transformers --llama-server PEERS/llamacpp/bin/llama-server --gguf smollm2-q4_0.gguf

One process, one runner, one engine a row over it, so that rows differ in nothing but their drafts. In every round each
row runs the same prompts, greedy, end-of-text ignored, in an order that turns from round to round, plain decoding among
them; a figure is the median over the rounds of (seconds of plain decoding / seconds of the row) in that round. Prompts
are computed in both, as a user waits for both. Acceptance: accepted / drafted tokens; length: tokens that a verified
row gave, the target's own included.

`sequential` is the textbook's verification, one call of the target for each drafted token, with `ngram`'s drafts: what
one pass over all drafts saves. `--transformers` runs `generate` plain, with `prompt_lookup_num_tokens` and with
`assistant_model` (the `--draft` folder), one request at a time, as it must. llama-server runs without and with n-gram
drafts, two servers in turn. `identical` counts requests whose text was plain decoding's to the token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llmopt
import torch
from engine import foreign, jiffies
from llmopt.optimizer.runtime_spec import DraftSpec
from llmopt.runtime.draft_setup import make_speculator
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.plan import StepPlan
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig
from speculation_tasks import TASKS, prompts

Texts = list[list[int]]
Row = Callable[[Texts, int], "tuple[Texts, dict[str, float]]"]
"""Prompts and new tokens → texts and counts (`drafted`, `accepted`, `verified` rows; none where nobody counts)."""


class Sequential:
    """A runner that verifies a draft by one call for each of its tokens, up to the first that greedy decoding
    rejects."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.block_size, self.num_blocks = runner.block_size, runner.num_blocks
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len

    def execute(self, plan: StepPlan) -> torch.Tensor:
        parts = []
        for row in plan.rows:
            first = len(row.token_ids) - row.num_drafts
            head = row._replace(token_ids=row.token_ids[:first], num_logits=row.num_logits - row.num_drafts)
            head = head._replace(num_drafts=0, block_table=self._cut(row.block_table, head.end))
            logits = self._runner.execute(StepPlan((head,))).clone()
            parts.append(logits)
            for i in range(first, len(row.token_ids)):
                if int(logits[-1].argmax()) != row.token_ids[i]:
                    parts.append(torch.zeros(len(row.token_ids) - i, self.vocab_size))
                    break
                one = row._replace(start=row.start + i, token_ids=row.token_ids[i : i + 1], num_logits=1, num_drafts=0)
                one = one._replace(block_table=self._cut(row.block_table, one.end))
                logits = self._runner.execute(StepPlan((one,))).clone()
                parts.append(logits)
        return torch.cat(parts)

    def _cut(self, table: tuple[int, ...], end: int) -> tuple[int, ...]:
        return table[: -(-end // self.block_size)]

    def close(self) -> None:
        """The runner belongs to the caller."""


def engine_row(runner: Any, spec: DraftSpec | None, folder: Path | None, batch: int) -> Row:
    """A row of our engine. Raises what the runner and the draft's runner raise."""
    config = SchedulerConfig(max_num_seqs=max(8, batch), prefix_caching=False)
    drafter = None if spec is None else make_speculator(spec, getattr(runner, "_runner", runner), config, folder)
    engine = Engine(runner, scheduler=config, drafter=drafter)

    def run(given: Texts, new: int) -> tuple[Texts, dict[str, float]]:
        before = engine.metrics()
        texts: dict[str, list[int]] = {}
        for number, prompt in enumerate(given):
            params = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
            engine.add_request(prompt, params, request_id=str(number))
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                texts.setdefault(output.request_id, []).extend(output.new_token_ids)
        after = engine.metrics()
        names = {"drafted": "num_draft_tokens", "accepted": "num_accepted_tokens", "verified": "num_drafts"}
        counts = {
            name: getattr(after, f"spec_decode_{field}_total") - getattr(before, f"spec_decode_{field}_total")
            for name, field in names.items()
        }
        return [texts[str(number)] for number in range(len(given))], counts

    return run


def our_rows(llm: Any, args: argparse.Namespace, batch: int) -> dict[str, Row]:
    runner, rows = llm.runner, {"plain": engine_row(llm.runner, None, None, batch)}
    specs = {"ngram": DraftSpec(kind="ngram"), "suffix": DraftSpec(kind="suffix")}
    if args.layers:
        specs["layer_skip"] = DraftSpec(kind="layer_skip", layers=args.layers)
    if args.draft:
        specs["model"] = DraftSpec(kind="model", model=str(args.draft))
    for name, spec in specs.items():
        rows[name] = engine_row(runner, spec, args.draft, batch)
    if batch == 1:
        rows["ngram, 8 fixed"] = engine_row(runner, DraftSpec(kind="ngram", num_tokens=8), None, batch)
        rows["sequential"] = engine_row(Sequential(runner), DraftSpec(kind="ngram", num_tokens=8), None, batch)
    return rows


def measure(rows: dict[str, Row], given: Texts, new: int, rounds: int, keep: dict[str, Any]) -> list[dict[str, Any]]:
    """One record a row: the medians over the rounds. The first row is what the others are divided by."""
    names, seconds, counts = list(rows), {name: [] for name in rows}, {}  # type: ignore[var-annotated]
    texts: dict[str, Texts] = {}
    for name in names:
        rows[name](given[:1], 4)  # warm
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before, began = jiffies([os.getpid()]), time.perf_counter()
            texts[name], counts[name] = rows[name](given, new)
            wall = time.perf_counter() - began
            seconds[name].append(wall)
            keep.setdefault("foreign", []).append(foreign(before, jiffies([os.getpid()]), wall))
    first, records = names[0], []
    for name in names:
        found = counts[name]
        tokens = sum(map(len, texts[name]))
        ratios = [slow / own for slow, own in zip(seconds[first], seconds[name])]
        records.append({
            "row": name,
            "speedup": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
            "tokens_per_second": tokens / statistics.median(seconds[name]),
            "acceptance": found["accepted"] / found["drafted"] if found.get("drafted") else None,
            "length": 1 + found["accepted"] / found["verified"] if found.get("verified") else None,
            "drafted": found.get("drafted"),
            "identical": sum(a == b for a, b in zip(texts[name], texts[first])), "requests": len(given),
        })  # fmt: skip
    return records


def markdown(records: list[dict[str, Any]]) -> str:
    """A table a batch size: rows by tasks; a cell is speed-up, acceptance and length."""
    out = []
    for system in dict.fromkeys(r["system"] for r in records):
        for batch in sorted({r["batch"] for r in records if r["system"] == system}):
            cells = {(r["row"], r["task"]): r for r in records if (r["system"], r["batch"]) == (system, batch)}
            out += [f"\n{system}, batch {batch}\n", f"| drafts | {' | '.join(TASKS)} | identical |"]
            out.append(f"|{'---|' * (len(TASKS) + 2)}")
            for row in dict.fromkeys(name for name, _ in cells):
                own = [cells.get((row, task)) for task in TASKS]
                known = [r for r in own if r is not None]
                same = f"{sum(r['identical'] for r in known)} of {sum(r['requests'] for r in known)}"
                out.append(f"| {row} | {' | '.join(map(cell, own))} | {same} |")
    return "\n".join([*out, ""])


def cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    if record["row"].endswith("plain"):
        return f"{record['tokens_per_second']:.0f} tok/s"
    more = ""
    if record["acceptance"] is not None:
        more = f", {record['acceptance']:.0%}"
        if record["length"] is not None:
            more += f", {record['length']:.1f}"
    return f"**{record['speedup']:.2f}** ({record['least']:.2f}–{record['most']:.2f}){more}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="one or more folders or artifacts")
    parser.add_argument("--draft", type=Path, help="folder of a draft model, for kind `model` and for transformers")
    parser.add_argument("--layers", type=lambda s: [int(x) for x in s.split(",")], help="layers of kind `layer_skip`")
    parser.add_argument("--text", type=Path, required=True, help="a text whose passages are copied and summarized")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a task at batch 1; else the batch size")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, help="rounds of transformers and llama.cpp, if other than --rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--transformers", action="store_true", help="also transformers' generate, at batch 1")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="its model")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    text = args.text.read_text(encoding="utf-8")
    records: list[dict[str, Any]] = []
    about: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    about |= {"foreign": [], "seconds": {}, "cpus": os.cpu_count(), "threads": args.threads}

    def add(system: str, rows: dict[str, Row], batch: int, tokenizer: Any, peer: bool = False) -> None:
        rounds = args.peer_rounds if peer and args.peer_rounds else args.rounds
        for task in args.tasks:
            began = time.perf_counter()
            given = prompts(tokenizer, text, task, args.prompts if batch == 1 else batch)
            groups = [[one] for one in given] if batch == 1 else [given]
            for record in measure({n: in_turn(r, groups) for n, r in rows.items()}, given, args.new, rounds, about):
                records.append({"system": system, "batch": batch, "task": task, **record})
                print(
                    f"{time.strftime('%H:%M:%S')} {system}, {batch}, {task}, {record['row']}: {cell(record)}",
                    flush=True,
                )
            about["seconds"][f"{system}, {batch}, {task}"] = round(time.perf_counter() - began, 1)
            args.output.write_text(json.dumps({"about": about, "records": records}, indent=1) + "\n")

    for folder in args.model:
        blocks = max(args.batches) * 24 + 64
        with llmopt.load(folder, engine="native", draft=False, num_blocks=blocks, num_threads=args.threads) as llm:
            for batch in args.batches:
                add(folder.name, our_rows(llm, args, batch), batch, llm.tokenizer)
            tokenizer = llm.tokenizer
    if args.transformers:
        from speculation_peers import transformers_rows

        add("transformers", transformers_rows(args.model[0], args.draft), 1, tokenizer, peer=True)
    if args.llama_server and args.gguf:
        from speculation_peers import LlamaServers

        for batch in args.batches:
            with LlamaServers(args.llama_server, args.gguf, batch, args.threads) as servers:
                add("llama.cpp Q4_0", servers.rows, batch, tokenizer, peer=True)
    shares = about["foreign"]
    about["foreign"] = {"median": statistics.median(shares), "most": max(shares)}
    args.output.write_text(json.dumps({"about": about, "records": records}, indent=1) + "\n")
    report = (
        f"{markdown(records)}\nForeign CPU share: median {about['foreign']['median']:.2f}, most {max(shares):.2f}.\n"
    )
    args.output.with_suffix(".md").write_text(report)
    print(report)


def in_turn(row: Row, groups: list[Texts]) -> Row:
    """The row over groups of prompts, one group after the other; other prompts than theirs go through as they are."""
    total = sum(map(len, groups))

    def run(given: Texts, new: int) -> tuple[Texts, dict[str, float]]:
        if len(given) != total:
            return row(given, new)
        texts, counts = [], dict[str, float]()
        for group in groups:
            found, more = row(group, new)
            texts += found
            counts = {name: counts.get(name, 0) + value for name, value in more.items()}
        return texts, counts

    return run


if __name__ == "__main__":
    main()
