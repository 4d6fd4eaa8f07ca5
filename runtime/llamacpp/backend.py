"""The backend `llamacpp` behind an LLM: the engine over a llama-server of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..engine.loop import EngineLoop
from ..engine_backend import EngineBackend
from .engine import LlamaEngine
from .slots import LlamaSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


class LlamaCppBackend(EngineBackend):
    """Implements `Backend`."""

    name = "llamacpp"

    def __init__(self, slots: LlamaSlots, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self.notes, self.context_length, self.vocab_size = [], slots.max_model_len, slots.vocab_size
        self.engine = LlamaEngine(slots, tokenizer, eos_token_ids)
        self.loop = EngineLoop(self.engine)
