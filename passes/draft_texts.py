"""What a student learns from: texts that the target writes, and the target's own distribution of each next token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TOP_K = 16
"""Tokens of the target's distribution that are kept at each position, the rest of it as one."""
PROMPT = (8, 48)
"""Tokens of a calibration sequence that the target goes on from, at least and at most."""


@dataclass
class Texts:
    """tokens int64 [N, L], padded by their last token. lengths int64 [N]. indices int64, log_probs float32
    [N, L - 1, TOP_K]: the best next tokens after each but the last."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    indices: torch.Tensor
    log_probs: torch.Tensor

    def as_tensors(self) -> dict[str, torch.Tensor]:
        """In the dtypes in which they are kept on disk."""
        import torch

        return {
            "tokens": self.tokens.to(torch.int32),
            "lengths": self.lengths.to(torch.int32),
            "indices": self.indices.to(torch.int32),
            "log_probs": self.log_probs.to(torch.float16),
        }

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> Texts:
        """From what `as_tensors` gave; log_probs are as rounded there."""
        import torch

        whole = {name: tensors[name].to(torch.int64) for name in ("tokens", "lengths", "indices")}
        return cls(**whole, log_probs=tensors["log_probs"].to(torch.float32))

    @classmethod
    def joined(cls, parts: Sequence[Texts]) -> Texts:
        import torch

        names = ("tokens", "lengths", "indices", "log_probs")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.tokens)


class Writer:
    """Has the target write texts over a runner.

    openings: token ids that a quarter of the texts begin with; sequences: calibration texts whose beginnings another
    quarter begins with. The other half are calibration texts as they are, which only have to be scored, as long as
    there are any. ends: tokens that end a text.
    """

    def __init__(
        self,
        runner: Any,
        openings: Sequence[Sequence[int]],
        sequences: Sequence[Sequence[int]],
        ends: Sequence[int],
        length: int,
        seed: int,
    ) -> None:
        self.runner, self.openings, self.sequences = runner, openings, sequences
        self.ends, self.length, self.seed = ends, length, seed

    def round(self, number: int, count: int) -> Texts:
        """The texts of round `number`: the same for the same seed, whatever was written before."""
        from ..runtime.engine.engine import Engine
        from ..runtime.engine.sampling_params import SamplingParams
        from ..runtime.engine.scheduler_config import SchedulerConfig

        engine = Engine(self.runner, scheduler=SchedulerConfig(max_num_seqs=count, prefix_caching=False))
        texts: dict[str, list[int]] = {}
        for i in range(count):
            place = (number * count + i) // 2
            if i % 2 and place < len(self.sequences):
                texts[str(i)] = list(self.sequences[place][: self.length])
                continue
            prompt = self._prompt(place)
            texts[str(i)] = list(prompt)
            params = SamplingParams(
                temperature=1.0,
                top_p=0.95,
                seed=(self.seed * 1_000_003 + number * count + i) % 2**63,
                max_new_tokens=self.length - len(prompt),
                ignore_eos=True,
                stop_token_ids=tuple(self.ends),
            )
            engine.add_request(prompt, params, request_id=str(i))
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                texts[output.request_id] += output.new_token_ids
        return self._scored([texts[str(i)] for i in range(count)])

    def _prompt(self, number: int) -> list[int]:
        if number % 2 and self.sequences:
            rng = random.Random(f"{self.seed} {number}")
            sequence = self.sequences[number // 2 % len(self.sequences)]
            return list(sequence[: min(rng.randint(*PROMPT), self.length // 2)])
        return list(self.openings[number // 2 % len(self.openings)])[: self.length // 2]

    def _scored(self, texts: Sequence[list[int]]) -> Texts:
        """The target's best next tokens at every position of the texts."""
        import torch

        from ..runtime.engine.plan import Row, StepPlan

        tokens = torch.tensor([text + text[-1:] * (self.length - len(text)) for text in texts])
        shape = (len(texts), self.length - 1, TOP_K)
        indices, log_probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for i, text in enumerate(texts):
            table = tuple(range(-(-len(text) // self.runner.block_size)))
            logits = self.runner.execute(StepPlan((Row(-1 - i, 0, tuple(text), table, len(text)),)))
            best = logits[: len(text) - 1].float().log_softmax(-1).topk(TOP_K, dim=-1)
            indices[i, : len(text) - 1], log_probs[i, : len(text) - 1] = best.indices.cpu(), best.values.cpu()
        lengths = torch.tensor([len(text) for text in texts])
        return Texts.of(Texts(tokens, lengths, indices, log_probs).as_tensors())
