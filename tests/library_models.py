"""What the tests of bitsandbytes' and torchao's formats share: a tiny model through the pass, and its readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llmopt.exporters.huggingface import HuggingFaceExporter
from llmopt.optimizer.base import Context, PassReport
from llmopt.optimizer.calibration import Calibration
from llmopt.optimizer.checkpoint import Checkpoint
from llmopt.optimizer.model import LoadedModel
from llmopt.optimizer.source_model import load_source, open_source
from llmopt.optimizer.sources import describe, resolve
from llmopt.passes.quantize import Quantize

TOKENS = torch.randint(3, 400, (2, 9), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}


def optimize(source: Path, folder: Path, lazy: bool = False, **options: Any) -> tuple[LoadedModel, PassReport]:
    """The pass over the model in `source`, in memory or block by block from its files, exported to `folder`."""
    found = resolve(source)
    info = describe(found)
    model: Any = open_source(found) if lazy else load_source(found)
    assert isinstance(model, LoadedModel) and (model.weights is not None) == lazy
    work = folder.with_name(f"{folder.name}-work")
    work.mkdir()
    context = Context(info, Calibration(model.tokenizer, "default", 4, 64), 0, work)
    if lazy:
        context.checkpoint = Checkpoint(work / "checkpoint")
    with torch.no_grad():
        report = Quantize(**options).run(model, context)
    folder.mkdir()
    HuggingFaceExporter().export(model, folder, context)
    return model, report


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits.float()


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL in nats a token of logits [..., vocab]."""
    p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The weight files and config.json of a folder."""
    files = [*folder.glob("*.safetensors"), folder / "config.json"]
    return {path.name: path.read_bytes() for path in sorted(files)}
