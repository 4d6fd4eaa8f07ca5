"""Evaluation beside its definitions: perplexity beside transformers' documented loop, lm-eval's `hf` backend, self-KL.

    python benchmarks/eval_check.py perplexity MODEL --text FILE [--windows 8] [--window-length 1024] [--stride 512]
    python benchmarks/eval_check.py harness MODEL --text FILE [--items 200]
    python benchmarks/eval_check.py self MODEL --text FILE

Prints one line of JSON a row. `harness` makes a local multiple-choice task of the text: which sentence end belongs
to a beginning; needs the extra `eval`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import llmopt
import torch

TASK = """\
task: sentence_ends
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""


def documented(folder: str, text: str, dtype: str, length: int, stride: int, windows: int | None) -> tuple[float, int]:
    """The loop of transformers' guide "Perplexity of fixed-length models": perplexity and the tokens it counts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if dtype == "auto" else getattr(torch, dtype))
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    nll_sum, n_tokens, prev_end = 0.0, 0, 0
    for number, begin in enumerate(range(0, ids.shape[1], stride)):
        end = min(begin + length, ids.shape[1])
        inputs, new = ids[:, begin:end], end - prev_end
        targets = inputs.clone()
        targets[:, :-new] = -100
        with torch.inference_mode():
            loss = model(inputs, labels=targets).loss
        valid = int((targets != -100).sum()) - targets.shape[0]
        nll_sum, n_tokens = nll_sum + loss.double().item() * valid, n_tokens + valid
        prev_end = end
        if end == ids.shape[1] or number + 1 == windows:
            break
    return math.exp(nll_sum / n_tokens), n_tokens


def perplexity(options: argparse.Namespace) -> None:
    """Our perplexity by both engines beside the documented loop's, in the model's dtype and in float32."""
    text = Path(options.text).read_text(encoding="utf-8")
    for dtype in options.dtypes.split(","):
        start = time.perf_counter()
        shape = (options.window_length, options.stride, options.windows)
        expected, _ = documented(options.model, text, dtype, *shape)
        row("perplexity", by="transformers, documented loop", dtype=dtype, perplexity=expected, seconds=since(start))
        for engine in options.engines.split(","):
            found = evaluated(options, engine=engine, dtype=dtype)
            apart = found.perplexity / expected - 1
            row("perplexity", by=engine, dtype=dtype, perplexity=found.perplexity, apart=apart,
                bits_per_byte=found.bits_per_byte, seconds=found.data["seconds"])  # fmt: skip


def itself(options: argparse.Namespace) -> None:
    """KL of the model from itself."""
    for engine in options.engines.split(","):
        found = evaluated(options, against=options.model, engine=engine, new_tokens=16)
        kl = found.divergence or {}
        row("self", by=engine, max_kl=kl["max_kl"], tokens=kl["num_tokens"], top1=kl["top1_agreement"],
            prompts_that_differ=(found.generation or {}).get("num_differing"))  # fmt: skip


def harness(options: argparse.Namespace) -> None:
    """Log-likelihoods of every choice of a local task beside those of lm-eval's own backend."""
    import lm_eval
    from llmopt.evaluation.harness import harness_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        rows = sentence_ends(Path(options.text).read_text(encoding="utf-8"), options.items, options.choices)
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        (Path(folder) / "sentence_ends.yaml").write_text(TASK.format(file=file), encoding="utf-8")
        manager = TaskManager(include_path=folder, include_defaults=False)

        def run(model: Any) -> tuple[dict[str, Any], list[tuple[float, bool]]]:
            found = lm_eval.simple_evaluate(
                model=model, tasks=["sentence_ends"], task_manager=manager, bootstrap_iters=10
            )
            samples = sorted(found["samples"]["sentence_ends"], key=lambda one: one["doc_id"])
            return found["results"]["sentence_ends"], [tuple(r[0]) for one in samples for r in one["resps"]]

        for dtype in options.dtypes.split(","):
            start = time.perf_counter()
            theirs, expected = run(
                HFLM(pretrained=options.model, dtype=dtype, device="cpu", batch_size=options.batch_size)
            )
            row("harness", by="hf", dtype=dtype, acc=theirs["acc,none"], acc_norm=theirs["acc_norm,none"],
                loglikelihoods=len(expected), seconds=since(start))  # fmt: skip
            for engine in options.engines.split(","):
                start = time.perf_counter()
                with llmopt.load(options.model, engine=engine, dtype=dtype) as llm:
                    ours, found = run(harness_model(llm))
                apart = [abs(a[0] - b[0]) for a, b in zip(found, expected, strict=True)]
                row("harness", by=engine, dtype=dtype, acc=ours["acc,none"], acc_norm=ours["acc_norm,none"],
                    largest_difference=max(apart), mean_difference=sum(apart) / len(apart),
                    mean_loglikelihood=sum(b[0] for b in expected) / len(expected),
                    greedy_differs=sum(a[1] != b[1] for a, b in zip(found, expected)),
                    seconds=since(start))  # fmt: skip


def sentence_ends(text: str, items: int, count: int) -> list[dict[str, Any]]:
    """Sentences cut in two: the beginning, and `count` ends, its own among those of others, placed by a seed."""
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", text) if 6 <= len(s.split()) <= 14 and "=" not in s]
    cut = [(s.split()[: len(s.split()) // 2], s.split()[len(s.split()) // 2 :]) for s in sentences]
    chosen, generator = random.Random(0).sample(range(len(cut)), items), random.Random(1)
    rows = []
    for index in chosen:
        begin, end = cut[index]
        choices = [cut[i][1] for i in generator.sample([i for i in range(len(cut)) if i != index], count - 1)]
        label = generator.randrange(count)
        choices.insert(label, end)
        rows.append({"context": " ".join(begin), "choices": [" " + " ".join(c) for c in choices], "label": label})
    return rows


def evaluated(options: argparse.Namespace, **more: Any) -> Any:
    """`llmopt.evaluate` on the options' text."""
    keys = ("windows", "window_length", "stride")
    return llmopt.evaluate(
        options.model, text=options.text, cache=False, **{key: getattr(options, key) for key in keys}, **more
    )


def since(start: float) -> float:
    """Seconds since `start`."""
    return round(time.perf_counter() - start, 1)


def row(what: str, **facts: Any) -> None:
    """One line of JSON."""
    print(json.dumps({"what": what, **facts}), flush=True)


def main() -> None:
    """Run the check that the command line names."""
    checks = {"perplexity": perplexity, "self": itself, "harness": harness}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=checks)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--text", required=True, help="UTF-8 text file")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-length", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--choices", type=int, default=4, help="sentence ends an item")
    parser.add_argument("--batch-size", type=int, default=16, help="of the harness's own backend")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--engines", default="static,native")
    options = parser.parse_args()
    checks[options.check](options)


if __name__ == "__main__":
    main()
