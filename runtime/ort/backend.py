"""The backend `onnxruntime` behind an LLM: the engine, its steps run by a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..engine.engine import Engine
from ..engine.loop import EngineLoop
from ..engine.scheduler_config import SchedulerConfig
from ..engine_backend import EngineBackend
from .runner import OnnxRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


class OnnxBackend(EngineBackend):
    """Implements `Backend`: continuous batching over `OnnxRunner`. A prompt's keys and values are its own: there is no
    prefix cache."""

    name = "onnxruntime"

    def __init__(self, runner: OnnxRunner, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        limits = SchedulerConfig(
            max_num_seqs=runner.num_blocks,
            max_num_batched_tokens=max(runner.chunk, runner.num_blocks),
            watermark=0.0,
            prefix_caching=False,
        )
        self.notes, self.context_length, self.vocab_size = [], runner.max_model_len, runner.vocab_size
        self.engine = Engine(runner, tokenizer, scheduler=limits, eos_token_ids=eos_token_ids)
        self.loop = EngineLoop(self.engine)
