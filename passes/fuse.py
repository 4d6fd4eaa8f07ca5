"""Pass `fuse`: norm weights folded into linear layers, and linear layers with the same input multiplied as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from ..optimizer.base import Context, Options, Pass, PassReport, PlanItem
from ..optimizer.errors import RunError
from ..optimizer.runtime_spec import FuseSpec

if TYPE_CHECKING:
    from ..optimizer.model import LoadedModel, ModelInfo
    from .rotation.stream import Stream


class Fuse(Pass):
    """Folds norms (a change of weights, exact up to rounding) and asks the runtime to fuse layers (none).

    Fusing layers changes no file: transformers has no fused form of most architectures, and the folder has to open
    everywhere. The request goes into the RuntimeSpec; engines that call the model's modules apply it at load to layers
    that are not quantized. The native CPU engine multiplies such layers together in any case.
    """

    name = "fuse"
    provides: ClassVar[frozenset[str]] = frozenset({"fused"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"fused", "quantized_weights"})

    class Config(Options):
        qkv: bool = Field(True, description="Ask the runtime to compute queries, keys and values by one product.")
        gate_up: bool = Field(True, description="The same for the feed-forward's gate and up projections.")
        norms: bool = Field(
            False,
            description="Fold the norms' weights into the linear layers behind them; the norms keep weight 1. Weights "
            "quantized in groups of input columns can lose by it, because columns of one group then differ more: "
            "compare with and without.",
        )
        check_tokens: int = Field(
            64, ge=2, le=4096, description="Random tokens on which logits before and after a fold are compared."
        )

        @model_validator(mode="after")
        def _possible(self) -> Fuse.Config:
            if not (self.qkv or self.gate_up or self.norms):
                raise ValueError("with `qkv`, `gate_up` and `norms` all false there is nothing to fuse")
            return self

    config: Config

    def plan(self, info: ModelInfo) -> PlanItem:
        """Says what will have an effect; a refusal names what stands in the way."""
        item = PlanItem(self._summary(), runtime={"fuse": self._spec().model_dump()} if self._asks else {})
        groups = self._groups(info.skeleton)
        for kind, (count, fused) in groups.items():
            if fused:
                item.notes.append(f"{kind}: fused in this architecture already ({fused})")
            elif not count:
                item.refusals.append(f"{kind}: the model has no such layers side by side; set `{kind}: false`")
        if self._asks:
            item.notes.append(
                "qkv and gate_up change no file and no size; engines other than the native CPU one apply them at load, "
                "to layers that are not quantized"
            )
        if self.config.norms:
            from .rotation.stream import find_stream

            stream = find_stream(info.skeleton)
            item.refusals += _fold_refusals(stream)
            if stream.tied:
                item.notes.append("the final norm keeps its weights: the head is tied to the embeddings")
            item.seconds = sum(p.numel() for p in info.skeleton.parameters()) * 1e-8
            item.peak_memory = 3 * 8 * min(2**23, max((p.numel() for p in info.skeleton.parameters()), default=0))
        return item

    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Fold and record. Raises RunError as `plan` refuses, and where a fold changes the logits."""
        details: dict[str, Any] = {}
        if self.config.norms:
            details.update(self._fold(model, context))
        if self._asks:
            model.runtime.fuse = self._spec()
            details.update(self._spec().model_dump())
        return PassReport(self._summary(), details)

    def _fold(self, model: LoadedModel, context: Context) -> dict[str, Any]:
        from .rotation.check import probe_logits, require_equal
        from .rotation.edits import Edits
        from .rotation.fold import fold_norm, foldable
        from .rotation.stream import find_stream

        stream, tokens = find_stream(model.module), self.config.check_tokens
        refusals = _fold_refusals(stream)
        if refusals:
            raise RunError(refusals[0], where=self.name)
        before, edits = probe_logits(model.module, tokens, context.seed), Edits()
        folded = foldable(stream, model.module)
        for reads in folded:
            fold_norm(reads, model.module, edits)
        edits.apply(model.module)
        after = probe_logits(model.module, tokens, context.seed)
        change = require_equal(before, after, model.dtype, self.name)
        kept = [reads.norm for reads in stream.reads if reads not in folded]
        return {"folded_norms": len(folded), "kept_norms": kept, "logit_change": change, "check_tokens": tokens}

    @property
    def _asks(self) -> bool:
        return self.config.qkv or self.config.gate_up

    def _spec(self) -> FuseSpec:
        return FuseSpec(qkv=self.config.qkv, gate_up=self.config.gate_up)

    def _groups(self, skeleton: Any) -> dict[str, tuple[int, str]]:
        """For each kind asked for: how many groups of plain layers there are, and the name of a layer fused already."""
        from ..runtime.fused_linears import MEMBERS

        already = {"qkv": ("qkv_proj", "query_key_value", "c_attn"), "gate_up": ("gate_up_proj",)}
        out = {}
        for kind in (k for k in MEMBERS if getattr(self.config, k)):
            modules = list(skeleton.named_modules())
            count = sum(all(hasattr(m, name) for name in MEMBERS[kind]) for _, m in modules)
            fused = next((f"{n}.{own}" for n, m in modules for own in already[kind] if hasattr(m, own)), "")
            out[kind] = (count, "" if count else fused)
        return out

    def _summary(self) -> str:
        parts = [f"{kind} by one product" for kind in ("qkv", "gate_up") if getattr(self.config, kind)]
        return ", ".join([*parts, *(["norms folded into the layers behind them"] if self.config.norms else [])])


def _fold_refusals(stream: Stream) -> list[str]:
    return [f"norms cannot be folded: {reason}; set `norms: false`" for reason in stream.fold_obstacles[:1]]
