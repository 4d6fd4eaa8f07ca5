"""What tests of the pipeline and of the quantize pass share: short runs, and the pass on its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import llmopt
import torch
from llmopt.optimizer.base import Context, PassReport
from llmopt.optimizer.model import LoadedModel, ModelInfo, SourceIdentity, TensorInfo
from llmopt.passes.quantize import Quantize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EVALUATE = {"windows": 2, "window_length": 64, "speed": False, "new_tokens": 8, "prompts": ["The capital", "Once"]}
CALIBRATION = {"num_samples": 4, "sequence_length": 64}
QUANTIZE = {"quantize": {"method": "gptq", "bits": 4, "group_size": 32, "symmetric": False}}


def run(model, passes, out, **more):
    """The whole pipeline on little text."""
    settings = {"evaluate": EVALUATE, "calibration": CALIBRATION, "report": False, **more}
    return llmopt.optimize(model, passes=passes, out=out, **settings)


def leftovers(folder: Path) -> list[str]:
    """Hidden files, which is what a run that was cut short could leave."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


class Tokens:
    """Calibration of random tokens below 96."""

    def __init__(self) -> None:
        self._ids = torch.randint(3, 96, (4, 1, 32), generator=torch.Generator().manual_seed(8))

    def batches(self) -> list[torch.Tensor]:
        return list(self._ids)

    num_tokens = 128


def quantize(model: PreTrainedModel, **options: Any) -> PassReport:
    """The pass alone on a model in memory, calibrated on `Tokens`."""
    tensors = {n: TensorInfo(tuple(t.shape), "F32", t.nbytes, "model") for n, t in model.state_dict().items()}
    source = SourceIdentity("tiny", "folder", Path("."), "0" * 64)
    context = Context(ModelInfo(source, model.config, tensors), Tokens(), 0, Path("."))
    return Quantize(**options).run(LoadedModel(model, None, source), context)
