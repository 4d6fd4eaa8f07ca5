"""Pass `rotate`: orthogonal changes of basis folded into the weights, so that no channel stands out in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field, model_validator

from ..optimizer.base import Context, ModulePlan, Options, Pass, PassReport, PlanItem
from ..optimizer.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..optimizer.model import LoadedModel, ModelInfo
    from .rotation.stream import Stream


class Rotate(Pass):
    """Rotates the residual stream and each head's values, with nothing left to do at run time.

    After QuaRot (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456) and SpinQuant (Liu et al. 2024,
    https://arxiv.org/abs/2405.16406): norm weights are folded into the linear layers behind them, then every weight
    that reads the residual stream becomes W Q and every one that writes it Q^T W (their R1); values and output
    projections are rotated head by head (R2). Q is a Hadamard matrix with random signs, or where a norm subtracts the
    mean, K^T P K of a Hadamard K and a signed permutation P, which keeps the mean. The result is a plain model of the
    same architecture whose logits are the same up to rounding, which is checked. The online rotations R3 and R4 are not
    done. Whether it helps depends on the model: gate the result.
    """

    name = "rotate"
    provides: ClassVar[frozenset[str]] = frozenset({"rotated_weights"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"rotated_weights", "quantized_weights"})

    class Config(Options):
        residual: bool = Field(
            True, description="Rotate the residual stream (R1), which folds all norms into the layers behind them."
        )
        values: bool = Field(True, description="Rotate each head's values and the output projection's columns (R2).")
        untie: bool = Field(
            False,
            description="Give a head that is tied to the input embeddings a matrix of its own, which `residual` needs: "
            "the final norm's weights go into the head alone. The model grows by the size of that matrix.",
        )
        check_tokens: int = Field(
            64, ge=2, le=4096, description="Random tokens on which logits before and after are compared."
        )

        @model_validator(mode="after")
        def _possible(self) -> Rotate.Config:
            if not self.residual and not self.values:
                raise ValueError("with `residual: false` and `values: false` there is nothing to rotate")
            if self.untie and not self.residual:
                raise ValueError("`untie` is needed for `residual: true` only")
            return self

    config: Config

    def plan(self, info: ModelInfo) -> PlanItem:
        """Refusals name the module that stands in the way; the untied head is the only change of size."""
        from .rotation.stream import find_stream

        stream = find_stream(info.skeleton)
        uniform = stream.tied and self.config.residual and _stored_final_norm(info, stream)
        item = PlanItem(self._summary(stream), refusals=self._refusals(stream, uniform))
        if item.refusals:
            return item
        if self.config.residual and self.config.untie and stream.tied:
            head = info.skeleton.get_parameter(stream.head)
            name = stream.head.removesuffix(".weight")
            item.modules.append(ModulePlan(name, "untied from the embeddings", 0, head.numel() * info.dtype_bytes))
            item.notes.append(
                f"the head no longer shares the embeddings' matrix: {head.numel() * info.dtype_bytes:,} bytes more "
                "(a later `quantize` with `lm_head: quantize` needs `untie: true` too)"
            )
        item.notes.append(self._sizes(stream))
        largest = max((p.numel() for p in info.skeleton.parameters()), default=0)
        item.peak_memory = min(largest, 2**26) * 8 * 3
        item.seconds = sum(p.numel() for p in info.skeleton.parameters()) * 6e-8
        return item

    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Rotate and compare logits. Raises RunError as `plan` refuses, and where the logits do not stay the same."""
        import torch

        from .rotation.check import probe_logits, require_equal
        from .rotation.edits import Edits
        from .rotation.fold import is_uniform
        from .rotation.rotate_stream import rotate_residual, rotate_values
        from .rotation.stream import find_stream

        module, config = model.module, self.config
        stream = find_stream(module)
        uniform = bool(stream.reads) and is_uniform(stream.final, module)
        refusals = self._refusals(stream, uniform)
        if refusals:
            raise RunError(refusals[0], where=self.name)
        before = probe_logits(module, config.check_tokens, context.seed)
        generator = torch.Generator().manual_seed(context.seed)
        edits, untied, details = Edits(), False, dict[str, Any]()
        if config.residual:
            untied = stream.tied and config.untie
            if untied:
                untie_head(cast("PreTrainedModel", module))
            keep_final = stream.tied and not untied
            details["folded_norms"] = rotate_residual(stream, module, edits, generator, keep_final)
        if config.values:
            rotate_values(stream, module, edits, generator)
        edits.apply(module)
        change = require_equal(before, probe_logits(module, config.check_tokens, context.seed), model.dtype, self.name)
        details.update(untied=untied, weights=len(edits.by_name), logit_change=change, check_tokens=config.check_tokens)
        return PassReport(f"{self._summary(stream)}; logits changed by {change:.2g} of their size", details)

    def restore(self, model: LoadedModel, report: PassReport) -> None:
        """Give the head its own matrix where `run` did."""
        if report.details.get("untied"):
            untie_head(cast("PreTrainedModel", model.module))

    def _refusals(self, stream: Stream, uniform: bool) -> list[str]:
        out: list[str] = []
        if self.config.residual:
            out += [f"the residual stream cannot be rotated: {reason}" for reason in stream.obstacles[:1]]
            if not out and stream.tied and not self.config.untie and not uniform:
                out.append(
                    "the head is tied to the input embeddings, and the final norm between them weighs channels "
                    "differently, so one rotated matrix cannot serve both: set `untie: true` (the head then takes "
                    "bytes of its own) or `residual: false` (values alone are rotated)"
                )
        if self.config.values:
            out += [f"values cannot be rotated: {reason}" for reason in stream.value_obstacles[:1]]
        if out and self.config.values and self.config.residual and (not stream.value_obstacles or not stream.obstacles):
            other = "`residual: false`" if stream.obstacles else "`values: false`"
            if "set `untie" not in out[0]:
                out[0] += f" ({other} rotates the rest)"
        return out

    def _summary(self, stream: Stream) -> str:
        parts = []
        if self.config.residual:
            parts.append(f"the residual stream of {stream.hidden} channels rotated, {len(stream.reads)} norms folded")
        if self.config.values:
            parts.append(f"values of {len(stream.values)} attentions rotated head by head")
        return ", ".join(parts)

    def _sizes(self, stream: Stream) -> str:
        from .rotation.hadamard import factors, is_hadamard

        sizes = [stream.hidden] if self.config.residual else []
        if self.config.values and stream.values:
            sizes.append(stream.values[0].head_dim)
        kinds = [
            f"{size} = {' x '.join(str(f.shape[0]) for f in factors(size))}"
            f"{'' if is_hadamard(size) else ' (one of them a cosine transform)'}"
            for size in sizes
        ]
        return f"Hadamard matrices by Kronecker factors: {', '.join(kinds)}"


def untie_head(module: PreTrainedModel) -> None:
    """Give the output head a copy of the matrix that it shares with the embeddings, and say so in the configuration."""
    from torch import nn

    head = module.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for config in {id(c): c for c in (module.config, module.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    if hasattr(module, "all_tied_weights_keys"):
        module.all_tied_weights_keys = module.get_expanded_tied_weights_keys(all_submodels=True)


def _stored_final_norm(info: ModelInfo, stream: Stream) -> bool:
    """Whether the final norm weighs all channels alike: one vector, read from its file."""
    from ..runtime.tensor_files import locate, read_stored
    from .rotation.fold import is_uniform_vector

    if not stream.reads:
        return False
    form, name = stream.final.form, f"{stream.final.norm}.weight"
    if form.has_bias or not form.has_weight or name not in info.tensors:
        return not form.has_bias and not form.has_weight
    tensor = info.tensors[name]
    return is_uniform_vector(read_stored(locate([info.source.folder / tensor.file])[tensor.name or name]))
