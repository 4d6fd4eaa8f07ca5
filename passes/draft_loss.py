"""The loss that a student is trained with: Kullback-Leibler divergence from the target's distribution, of which the
best tokens are known and the rest as one, with a head that is computed for a part of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .draft_texts import Texts

NEGATIVES = 2048
"""Tokens drawn at random that stand for the vocabulary outside the target's best ones."""


def divergence(logits: torch.Tensor, log_z: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """KL(target || student) of each position, in nats, float32 [N].

    logits [N, k]: the student's, of the target's k best tokens; log_z [N]: logarithm of the sum of exp of all of the
    student's; log_probs [N, k]: the target's. What both leave to all other tokens counts as one outcome.
    """
    own = logits - log_z[:, None]
    known = log_probs.exp()
    rest = (1 - known.sum(-1)).clamp(min=1e-6)
    own_rest = (1 - own.exp().sum(-1)).clamp(min=1e-6)
    return (known * (log_probs - own)).sum(-1) + rest * (rest.log() - own_rest.log())


def log_partition(hidden: torch.Tensor, head: Any, candidates: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """An estimate of log sum exp over the vocabulary, [N]: the candidates' terms, and for all others those of `drawn`
    (none of them a candidate), weighted to stand for all. Exact where `drawn` is all others."""
    import torch

    inside = head(hidden, candidates).logsumexp(-1)
    others = head.size - len(candidates)
    if not len(drawn) or not others:
        return inside
    outside = head(hidden, drawn).logsumexp(-1) + torch.log(torch.tensor(others / len(drawn)))
    return torch.logaddexp(inside, outside)


class Head:
    """The student's head for some tokens: `head(hidden [N, H], tokens [M])` are logits [N, M]."""

    def __init__(self, student: Any) -> None:
        layer, config = student.get_output_embeddings(), student.config.get_text_config()
        self.weight, self.bias = layer.weight, getattr(layer, "bias", None)
        self.size = int(self.weight.shape[0])
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self.cap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[tokens]
        return self._finish(hidden @ self.weight[tokens].T, bias)

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """The best token of each row, int64 [N]."""
        return self._finish(hidden @ self.weight.T, self.bias).argmax(-1)

    def _finish(self, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        logits = (logits if bias is None else logits + bias) * self.scale
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()


def flat(student: Any, texts: Texts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the student's last hidden states [N, H], the target's best tokens [N, k], their log-probabilities [N, k]) of all
    positions of the texts that have a next token."""
    import torch

    device = student.device
    tokens = texts.tokens.to(device)
    hidden = student.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    real = (torch.arange(1, tokens.shape[1]) < texts.lengths[:, None]).to(device)
    return hidden[real], texts.indices.to(device)[real], texts.log_probs.to(device)[real]


def batch_loss(student: Any, head: Head, texts: Texts, generator: torch.Generator) -> torch.Tensor:
    """Mean divergence over the texts' positions. generator: draws the negatives, on the CPU."""
    import torch

    hidden, indices, log_probs = flat(student, texts)
    candidates = indices.unique()
    drawn = torch.randint(head.size, (NEGATIVES,), generator=generator).unique().to(candidates.device)
    drawn = drawn[~torch.isin(drawn, candidates)]
    if head.size <= NEGATIVES:  # all others, then
        everything = torch.arange(head.size, device=candidates.device)
        drawn = everything[~torch.isin(everything, candidates)]
    log_z = log_partition(hidden, head, candidates, drawn)
    places = torch.searchsorted(candidates, indices)
    logits = head(hidden, candidates).gather(1, places)
    return divergence(logits, log_z, log_probs).mean()


def agreement(student: Any, head: Head, texts: Texts) -> float:
    """Share of the positions at which the student's best token is the target's."""
    import torch

    same = total = 0
    with torch.no_grad():
        for i in range(len(texts)):
            one = type(texts)(
                texts.tokens[i : i + 1], texts.lengths[i : i + 1], texts.indices[i : i + 1], texts.log_probs[i : i + 1]
            )
            hidden, indices, _ = flat(student, one)
            same += int((head.best(hidden) == indices[:, 0]).sum())
            total += len(hidden)
    return same / max(1, total)
