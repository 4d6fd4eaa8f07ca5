"""Perplexity, mean KL and top-1 agreement of quantized models, in float32 by plain transformers; see `quantization.py`.

    python benchmarks/quantization_eval.py JOB.json

The job names the `source` folder, `text`, `length`, `windows` (0: all of them) and `students`: artifacts of ours, or
folders with a `dense.safetensors` (weights that replace the source's). Layers of ours that only store weights become
plain weights too; layers that quantize their inputs stay as they are. Each window goes through the source once and
through every student. One JSON line a student is printed at the end; Ctrl-C is an end as well (`tokens` says how many).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import llmopt
import torch
import transformers
from llmopt.evaluation.divergence import DivergenceMeter
from llmopt.evaluation.perplexity import PerplexityMeter
from llmopt.evaluation.texts import read_text, token_windows
from llmopt.optimizer.calibration import BeginningOfSequence
from llmopt.runtime.kernels.packed import WeightHolder
from llmopt.runtime.kernels.scaled import ScaledLinear
from safetensors.torch import load_file


def plain(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def student(source: Path, folder: Path) -> Any:
    """The module that stands for a quantized model."""
    if (folder / "dense.safetensors").exists():
        model = plain(source)
        _missing, unexpected = model.load_state_dict(load_file(folder / "dense.safetensors"), strict=False)
        if unexpected:
            raise RuntimeError(f"{folder.name}: tensors that the source does not have: {unexpected[:3]}")
        return model
    model = llmopt.load(folder, engine="static", dtype="float32").module
    for name, layer in list(model.named_modules()):
        if isinstance(layer, WeightHolder) and not isinstance(layer, ScaledLinear):
            packed: Any = layer
            dense = torch.nn.Linear(packed.in_features, packed.out_features, packed.bias is not None, device="meta")
            dense.weight = torch.nn.Parameter(packed.dequantize().float(), requires_grad=False)
            dense.bias = packed.bias
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, dense)
    return model


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids[None], use_cache=False).logits[0, :-1]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job.get("threads", 2))
    source = Path(job["source"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    bos = BeginningOfSequence.of(tokenizer).token is not None
    limit = job["windows"] or None
    windows = token_windows(read_text(job["text"]), tokenizer, job["length"], limit, add_bos=bos)
    teacher = plain(source)
    models = [(f, None if f == job["source"] else student(source, Path(f))) for f in job["students"]]
    meters = {folder: (PerplexityMeter(), DivergenceMeter()) for folder, _ in models}
    began = time.perf_counter()
    try:
        for number, ids in enumerate(windows):
            reference = logits(teacher, ids)
            for folder, model in models:
                own = reference if model is None else logits(model, ids)
                meters[folder][0].update(ids, own)
                meters[folder][1].update(reference, own)
            left = (time.perf_counter() - began) / (number + 1) * (len(windows) - number - 1)
            print(f"window {number + 1} of {len(windows)}, {left:.0f} s left", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped: the figures are of the windows so far", file=sys.stderr)
    for folder, _ in models:
        perplexity, divergence = meters[folder][0].result(), meters[folder][1].result()
        print(json.dumps({"student": folder, "perplexity": perplexity.perplexity, "tokens": perplexity.num_tokens,
                          "mean_kl": divergence.mean_kl, "p99_kl": divergence.p99_kl,
                          "top1": divergence.top1_agreement}))  # fmt: skip


if __name__ == "__main__":
    main()
