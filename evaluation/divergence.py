"""How far a model's next-token distributions lie from a reference's: KL divergence and top-1 agreement."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError

if TYPE_CHECKING:
    import torch

CHUNK = 32
"""Positions whose float32 log-probabilities are in memory at a time."""


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) in nats over positions, and the share of positions with the same most likely token."""

    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    num_tokens: int
    median_kl: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def kl_rows(reference: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per position: KL(softmax(reference) || softmax(logits)), float32 `[n]`; whether the argmax agrees, bool `[n]`.

    Both arguments are `[n, vocab]` of any float dtype; log-softmax in float32. Equal arguments give exactly 0.
    """
    import torch

    kls, agrees = [], []
    for start in range(0, len(reference), CHUNK):
        a, b = reference[start : start + CHUNK].float(), logits[start : start + CHUNK].float()
        log_p, log_q = torch.log_softmax(a, dim=-1), torch.log_softmax(b, dim=-1)
        difference = log_p - log_q
        kl = (log_p.exp() * difference).sum(-1)
        if bool(kl.isnan().any()):
            # A token that the reference masks out (log p = −∞) adds 0; other NaNs stay.
            kl = torch.where(log_p == float("-inf"), 0.0, log_p.exp() * difference).sum(-1)
        kls.append(kl.clamp_min(0.0))
        agrees.append(a.argmax(-1) == b.argmax(-1))
    return torch.cat(kls), torch.cat(agrees)


@dataclass
class DivergenceMeter:
    """Collects positions, window by window."""

    kls: list[torch.Tensor] = field(default_factory=list)
    agrees: list[torch.Tensor] = field(default_factory=list)

    def update(self, reference: torch.Tensor, logits: torch.Tensor) -> None:
        """Compare one window: both `[positions, vocab]`. Raises RunError where the shapes differ."""
        if reference.shape != logits.shape:
            raise RunError(
                f"the reference's logits are {tuple(reference.shape)}, the model's {tuple(logits.shape)}",
                what_to_do="The two models must have the same vocabulary.",
            )
        kl, agree = kl_rows(reference, logits)
        self.kls.append(kl.cpu())
        self.agrees.append(agree.cpu())

    def result(self) -> Divergence:
        """Raises RunError where nothing was compared or a divergence is not a number."""
        import torch

        if not self.kls:
            raise RunError("no position was compared, so there is no divergence")
        kl = torch.cat(self.kls).double()
        if not bool(torch.isfinite(kl).all()):
            raise RunError(
                f"the KL divergence is not a number at {int((~torch.isfinite(kl)).sum())} of {len(kl)} positions",
                what_to_do="Look for NaN or infinite weights.",
            )
        rank = max(1, round(0.99 * len(kl)))
        return Divergence(
            mean_kl=kl.mean().item(),
            p99_kl=kl.kthvalue(rank).values.item(),
            max_kl=kl.max().item(),
            top1_agreement=torch.cat(self.agrees).double().mean().item(),
            num_tokens=len(kl),
            median_kl=kl.median().item(),
        )

    def histogram(self) -> dict[str, list[float]]:
        """`counts[i]` positions have a divergence from `edges[i]` to `edges[i + 1]` nats; the last has no upper end."""
        import torch

        edges = [0.0, *(10.0**power * step for power in range(-6, 1) for step in (1, 3)), 10.0]
        kl = torch.cat(self.kls).double() if self.kls else torch.empty(0)
        counts = torch.bucketize(kl, torch.tensor(edges[1:], dtype=torch.float64), right=True).bincount(
            minlength=len(edges)
        )
        return {"edges": edges, "counts": counts.tolist()}
