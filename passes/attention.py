"""Pass `flash_attention`: choose the attention backend by trying it on the model's real shapes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from ..optimizer.base import Context, Options, Pass, PassReport, PlanItem
from ..optimizer.errors import RunError
from ..optimizer.runtime_spec import AttentionBackend, AttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from ..optimizer.model import LoadedModel, ModelInfo

IMPLEMENTATIONS = {"flash_attn": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
"""Backends in the order in which `auto` tries them → transformers' `attn_implementation`."""

TOLERANCES = {"float32": (1e-3, 1e-4), "float16": (0.1, 0.01), "bfloat16": (0.5, 0.05)}
"""Largest allowed max and mean |logit difference| to eager, in standard deviations of eager's logits, by dtype."""


class FlashAttention(Pass):
    """Tries attention backends on a sample of the calibration text, holds each against eager, records the choice.

    `auto` takes the first of flash_attn, sdpa and eager that runs and agrees with eager; times are recorded, but do not
    decide, so that the same recipe gives the same artifact. A backend named explicitly that does not run or does not
    agree is an error.
    """

    name = "flash_attention"
    changes_weights: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"attention_backend"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"attention_backend"})

    class Config(Options):
        backend: AttentionBackend = Field(
            "auto", description="`auto`, or the one backend to use: flash_attn (CUDA), sdpa, eager."
        )
        num_tokens: int = Field(256, ge=8, le=8192, description="Tokens of the calibration text to try with.")
        max_difference: float | None = Field(
            None,
            gt=0,
            description="Largest allowed |logit difference| to eager, in standard deviations of the logits; none: by "
            "dtype (float32 0.001, float16 0.1, bfloat16 0.5).",
        )
        mean_difference: float | None = Field(
            None,
            gt=0,
            description="The same for the mean (float32 0.0001, float16 0.01, bfloat16 0.05).",
        )

    config: Config

    def plan(self, info: ModelInfo) -> PlanItem:
        """A refusal where an explicit backend cannot work on this machine or with this architecture."""
        backend = self.config.backend
        reason = None if backend in ("auto", "eager") else unavailable(backend, info.skeleton)
        if backend == "flash_attn" and reason is None and info.dtype_bytes == 4:
            reason = "flash-attn runs float16 and bfloat16 only, the model is float32"
        return PlanItem(
            summary=f"attention backend {backend}, tried on {self.config.num_tokens} tokens",
            refusals=[f"backend: {backend} cannot be used: {reason}"] if reason else [],
            runtime={"attention": {"backend": backend}},
            seconds=2.0,
        )

    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Try, choose and record. Raises RunError where nothing that was allowed runs and agrees with eager.

        A lazy model is tried with its first blocks alone (`blocks` in the report; None where all ran).
        """
        from ..runtime.lazy import leading_blocks

        with leading_blocks(model) as blocks:
            report = self._choose(model, context)
        report.details["blocks"] = blocks
        return report

    def _choose(self, model: LoadedModel, context: Context) -> PassReport:
        module = cast("PreTrainedModel", model.module)
        ids = sample(context, self.config.num_tokens).to(module.device)
        before = module.config._attn_implementation
        wanted: list[str] = list(IMPLEMENTATIONS) if self.config.backend == "auto" else [self.config.backend]
        trials: dict[str, dict[str, Any]] = {}
        try:
            eager = self._trial(module, "eager", ids, None)
            for step, backend in enumerate(wanted, start=1):
                own = eager if backend == "eager" else self._trial(module, backend, ids, eager.get("logits"))
                trials[backend] = own
                context.progress(step, len(wanted), f"{backend}: {own['verdict']}")
        finally:
            _select(module, before)
        chosen = next((b for b in wanted if trials[b]["ok"]), None)
        if chosen is None:
            faults = "; ".join(f"{b}: {trials[b]['verdict']}" for b in wanted)
            raise RunError(f"no attention backend can be used ({faults})", self.name, "Set backend: auto or eager.")
        for backend in wanted[: wanted.index(chosen)]:
            context.note("fallback", f"attention backend {backend} was passed over: {trials[backend]['verdict']}")
        _select(module, IMPLEMENTATIONS[chosen])
        for trial in trials.values():
            trial.pop("logits", None)
        reason = "; ".join(f"{b}: {trials[b]['verdict']}" for b in wanted)
        model.runtime.attention = AttentionSpec(backend=self.config.backend, chosen=chosen, reason=reason)
        return PassReport(f"attention backend {chosen}", {"chosen": chosen, "tokens": ids.shape[1], "trials": trials})

    def _trial(self, module: PreTrainedModel, backend: str, ids: torch.Tensor, eager: Any) -> dict[str, Any]:
        """`ok`, `verdict`, and where it ran: `milliseconds` of the best of 3 and the differences to eager."""
        reason = None if backend == "eager" else unavailable(backend, module, device=module.device.type)
        if reason is not None:
            return {"ok": False, "verdict": reason}
        try:
            _select(module, IMPLEMENTATIONS[backend])
            logits, seconds = _forward(module, ids)
        except (ValueError, ImportError, RuntimeError, NotImplementedError) as error:
            return {"ok": False, "verdict": f"does not run ({str(error).strip().splitlines()[0][:200]})"}
        out: dict[str, Any] = {"ok": True, "milliseconds": round(seconds * 1e3, 3), "logits": logits}
        if not bool(logits.isfinite().all()):
            return {**out, "ok": False, "verdict": "its logits are not numbers"}
        if eager is None:
            return {**out, "verdict": "runs"}
        difference = (logits - eager).abs()
        scale = eager.std().clamp_min(1e-12)
        largest, mean = (difference.max() / scale).item(), (difference.mean() / scale).item()
        out.update(max_difference=largest, mean_difference=mean)
        most, most_mean = TOLERANCES.get(str(module.dtype).removeprefix("torch."), TOLERANCES["bfloat16"])
        most, most_mean = self.config.max_difference or most, self.config.mean_difference or most_mean
        out["verdict"] = f"differs from eager by {largest:.2g} at most, {mean:.2g} on average"
        if largest > most or mean > most_mean:
            out.update(ok=False, verdict=f"{out['verdict']} (allowed: {most:g} and {most_mean:g})")
        return out


def unavailable(backend: str, module: nn.Module, device: str | None = None) -> str | None:
    """Why this machine or architecture cannot run `backend`, or None. `module` may be on the meta device."""
    if backend == "flash_attn":
        import importlib.util

        import torch

        if not torch.cuda.is_available() or (device is not None and device != "cuda"):
            return "flash-attn needs CUDA"
        if importlib.util.find_spec("flash_attn") is None:
            return "the library flash-attn is not installed"
        if not getattr(module, "_supports_flash_attn", False):
            return f"{type(module).__name__} does not support flash-attn"
    if backend == "sdpa" and not getattr(module, "_supports_sdpa", False):
        return f"{type(module).__name__} does not support scaled_dot_product_attention"
    return None


def sample(context: Context, num_tokens: int) -> torch.Tensor:
    """The first `num_tokens` tokens of the calibration text (fewer where it is shorter): int64 `[1, n]`."""
    import torch

    found, parts = 0, []
    for batch in context.calibration.batches():
        parts.append(batch)
        found += batch.shape[1]
        if found >= num_tokens:
            break
    return torch.cat(parts, dim=1)[:, :num_tokens]


def _select(module: PreTrainedModel, implementation: str) -> None:
    """Raises ValueError where the model does not take the implementation."""
    if module.config._attn_implementation == implementation:
        return
    module.set_attn_implementation(implementation)
    actual = module.config._attn_implementation
    if actual != implementation:
        raise ValueError(f"the architecture keeps its own attention, {actual}")


def _forward(module: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Float32 logits `[tokens, vocab]` and the seconds of the best of 3 runs after one to warm up."""
    import torch

    best = float("inf")
    with torch.inference_mode():
        for _ in range(4):
            _synchronize(module)
            start = time.perf_counter()
            logits = module(input_ids=ids, use_cache=False).logits
            _synchronize(module)
            best = min(best, time.perf_counter() - start)
    return logits[0].float(), best


def _synchronize(module: PreTrainedModel) -> None:
    import torch

    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
