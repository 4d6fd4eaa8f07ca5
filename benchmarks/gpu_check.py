"""Check the engine on one GPU in under eight minutes: correctness, decode speed, share of the memory roofline, peers.

    python benchmarks/gpu_check.py                       # one CUDA device, Llama-3.1-8B's and Qwen3-0.6B's shapes
    python benchmarks/gpu_check.py --device cpu --tiny   # the same code on tiny shapes, in under a minute

Weights are random and made on the device. Every figure is printed as one JSON line when it is known and written to
`--output`; a stage that would begin after `--seconds` is skipped, which is a line too. Exits 1 if a correctness
check failed or a stage raised, 0 otherwise.

Terms: a decode step feeds one token of each of `batch` requests with `context` tokens in the cache and reads the
chosen ids back. Roofline: bytes that the step must read (every weight but the input embedding once, keys and values of
the context once) over the step's time, as a share of the bandwidth of a device copy measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_check_models import SHAPES, TINY, int4_tensors, make_model, step_bytes, to_int4


class Report:
    """Prints and keeps the figures; knows when the time is over."""

    def __init__(self, output: str | None, seconds: float) -> None:
        self.lines: list[dict[str, Any]] = []
        self.output, self.seconds, self.began = output, seconds, time.perf_counter()
        self.failed = False

    def add(self, **line: Any) -> None:
        line["at_s"] = round(time.perf_counter() - self.began, 1)
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        if self.output:
            with open(self.output, "w", encoding="utf-8") as file:
                json.dump(self.lines, file, indent=1)

    def stage(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Run one stage; one that raises is a line and the others still run."""
        if time.perf_counter() - self.began > self.seconds:
            self.add(stage=name, skipped="out of time")
            return
        try:
            function(*arguments)
        except Exception as error:
            self.failed = True
            self.add(stage=name, error=f"{type(error).__name__}: {str(error)[:300]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a large copy; median of five."""
    size = (4 << 30) if device == "cuda" else (64 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times[1:])


def correctness(report: Report, name: str, model: Any, backend: str, lengths: tuple[int, ...]) -> None:
    """Requests in chunks of 256 tokens, mixed, then their last logits against transformers' own attention."""
    from llmopt.runtime.engine.plan import Row, StepPlan
    from llmopt.runtime.engine.runner import EagerRunner

    runner = EagerRunner(model, attention=backend, num_blocks=64, max_model_len=1024)
    size = runner.block_size
    g = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, runner.vocab_size, (n,), generator=g).tolist() for n in lengths]
    blocks = iter(torch.randperm(64, generator=g).tolist())
    tables = [tuple(next(blocks) for _ in range(-(-len(t) // size))) for t in texts]
    got: dict[int, torch.Tensor] = {}
    for start in range(0, max(lengths), 256):
        rows = [
            Row(i, start, tuple(t[start : start + 256]), tables[i], int(start + 256 >= len(t)))
            for i, t in enumerate(texts)
            if start < len(t)
        ]
        out = runner.execute(StepPlan(tuple(rows)))
        got.update(zip((r.request_id for r in rows if r.num_logits), out.clone()))
    runner.close()
    errors = []
    model.set_attn_implementation("sdpa")
    for i, text in enumerate(texts):
        with torch.inference_mode():
            ids = torch.tensor([text], device=model.device)
            want = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        errors.append(float((got[i] - want).norm() / want.norm()))
    passed = max(errors) < 0.05
    report.failed |= not passed
    report.add(model=name, check="logits against transformers", attention=backend, worst=max(errors), passed=passed)


def decode_speed(runner: Any, batch: int, context: int, steps: int, device: str) -> float:
    """Median seconds of a decode step."""
    from llmopt.runtime.engine.plan import Row, StepPlan

    width = -(-(context + steps) // runner.block_size)
    tables = [tuple(range(i * width, (i + 1) * width)) for i in range(batch)]
    ids, times = [5] * batch, []
    for i in range(steps):
        start = time.perf_counter()
        plan = StepPlan(tuple(Row(r, context + i, (ids[r],), tables[r], 1) for r in range(batch)))
        ids = runner.execute(plan).argmax(-1).tolist()
        times.append(time.perf_counter() - start)
    synchronize(device)
    return statistics.median(times[steps // 4 :])


def decode(report: Report, name: str, model: Any, args: Any, peak: float, kind: str, **options: Any) -> None:
    """Decode speed of one runner at every batch size."""
    from llmopt.runtime.engine.runner_select import build_runner

    block = 256
    blocks = max(args.batches) * -(-(args.context + args.steps) // block)
    limit = args.context + args.steps + block
    options = {"num_blocks": blocks, "max_model_len": limit, **options}
    runner: Any = build_runner(model, kind, block_size=block, max_num_seqs=max(args.batches), **options)
    for batch in args.batches:
        seconds = decode_speed(runner, batch, args.context, args.steps, args.device)
        read = step_bytes(model, batch, args.context)
        report.add(
            model=name, decode=kind, weights="int4" if int4_tensors(model) else "bf16", batch=batch,
            context=args.context, tokens_per_s=round(batch / seconds, 1), step_ms=round(seconds * 1e3, 3),
            roofline_share=round(read / seconds / peak, 3), notes=runner.notes if batch == args.batches[0] else [],
        )  # fmt: skip
    runner.close()


def engine(report: Report, name: str, model: Any, args: Any, requests: int, prompt: int, new: int) -> None:
    """The whole engine (scheduler, sampler) against transformers' continuous batching, in tokens a second."""
    from llmopt.runtime.engine.engine import Engine
    from llmopt.runtime.engine.runner_select import build_runner
    from llmopt.runtime.engine.sampling_params import SamplingParams
    from transformers import GenerationConfig

    g = torch.Generator().manual_seed(2)
    vocab = model.config.vocab_size
    prompts = [torch.randint(3, vocab, (prompt,), generator=g).tolist() for _ in range(requests)]
    size = {"memory_utilization": 0.6} if args.device == "cuda" else {"num_blocks": requests * 8}
    runner = build_runner(model, "cudagraph", max_model_len=1024, max_num_seqs=requests, **size)
    ours = Engine(runner)
    for attempt in ("warm-up", "timed"):
        start = time.perf_counter()
        for p in prompts if attempt == "timed" else prompts[:2]:
            ours.add_request(p, SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True))
        while ours.has_work:
            ours.step()
        seconds = time.perf_counter() - start
    runner.close()
    report.add(
        model=name,
        engine="llmopt",
        requests=requests,
        blocks=runner.num_blocks,
        tokens_per_s=round(requests * new / seconds, 1),
    )
    model.set_attn_implementation("sdpa")
    config = GenerationConfig(max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    with torch.inference_mode():
        done = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    seconds = time.perf_counter() - start
    produced = sum(len(o.generated_tokens) for o in done.values())
    report.add(model=name, engine="transformers continuous batching", requests=requests, tokens_produced=produced,
               tokens_per_s=round(produced / seconds, 1))  # fmt: skip


def generate(report: Report, name: str, model: Any, args: Any) -> None:
    """transformers' `generate`: seconds of the last steps, by difference of two lengths."""
    model.set_attn_implementation("sdpa")
    for batch in args.batches:
        ids = torch.full((batch, args.context), 5, device=model.device)
        times = {}
        for new in (2, 2, 2 + args.generate_steps):
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                               do_sample=False, pad_token_id=0)  # fmt: skip
            synchronize(args.device)
            times[new] = time.perf_counter() - start
        seconds = max(times[2 + args.generate_steps] - times[2], 1e-9) / args.generate_steps
        report.add(model=name, decode="transformers generate", batch=batch, context=args.context,
                   tokens_per_s=round(batch / seconds, 1), step_ms=round(seconds * 1e3, 3))  # fmt: skip


def compiled(report: Report, name: str, model: Any, args: Any, peak: float) -> None:
    report.add(model=name, stage="captured graphs of the compiled model, which take their time to compile")
    decode(report, name, model, args, peak, "cudagraph", compiler="inductor")


def int4(report: Report, name: str, model: Any, args: Any, peak: float) -> None:
    error = to_int4(model)
    report.failed |= error > 0.02
    report.add(model=name, check="int4 product against its dequantized weights", worst=error, passed=error <= 0.02)
    decode(report, name, model, args, peak, "cudagraph")


def run(args: argparse.Namespace) -> int:
    report = Report(args.output, args.seconds)
    device = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    peak = copy_bandwidth(args.device)
    report.add(device=device, torch=torch.__version__, copy_bandwidth_gb_s=round(peak / 1e9, 1))
    for name in args.models:
        architecture, settings = SHAPES[name]
        model = make_model(architecture, TINY if args.tiny else settings, args.device)
        report.add(model=name, parameters=sum(p.numel() for p in model.parameters()))
        backends = ["varlen", "triton", "torch"] if args.device == "cuda" else ["torch", "auto"]
        for backend in backends:
            lengths = (700, 33, 260) if not args.tiny else (300, 33, 7)
            report.stage(f"correct {backend}", correctness, report, name, model, backend, lengths)
        report.stage("decode", decode, report, name, model, args, peak, "cudagraph")
        report.stage("engine", engine, report, name, model, args, 4 if args.tiny else 128, 64, 8 if args.tiny else 64)
        report.stage("generate", generate, report, name, model, args)
        report.stage("decode eager", decode, report, name, model, args, peak, "eager")
        if args.device == "cuda":
            report.stage("decode compiled", compiled, report, name, model, args, peak)
        report.stage("int4", int4, report, name, model, args, peak)
        del model
    report.add(finished=True, failed=report.failed)
    return int(report.failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and few steps")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=420.0, help="no stage begins after this many seconds")
    parser.add_argument("--output", help="JSON file that is rewritten after every figure")
    args = parser.parse_args()
    args.batches = args.batches or ([1, 4] if args.tiny else [1, 32, 256])
    args.context = args.context or (64 if args.tiny else 512)
    args.steps = args.steps or (8 if args.tiny else 48)
    args.generate_steps = 4 if args.tiny else 24
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: use --device cpu --tiny", file=sys.stderr)
        return 2
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
