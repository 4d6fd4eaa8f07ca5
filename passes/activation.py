"""Pass `activation`: the arithmetic of linear layers at run time: int8 activations, and the format of the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from ..optimizer.base import Context, Options, Pass, PassReport, PlanItem
from ..optimizer.errors import RunError
from ..optimizer.runtime_spec import ActivationFormat, HeadFormat, LinearSpec

if TYPE_CHECKING:
    from torch import nn

    from ..optimizer.model import LoadedModel, ModelInfo


class Activation(Pass):
    """Records in the RuntimeSpec that activations enter integer linears as int8, and how the head is held.

    Changes no stored weight; the proof measures with these settings, so that gates judge them. Only the native CPU
    engine has them: another engine that opens the artifact computes without, and says so.
    """

    name = "activation"
    changes_weights: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"activation"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"activation"})

    class Config(Options):
        dtype: ActivationFormat = Field(
            "int8",
            description="`int8`: each token's activations are quantized at run time, symmetrically, one scale for each "
            "weight group, wherever the weight is integer; `none`: only `lm_head` counts.",
        )
        lm_head: HeadFormat = Field(
            "stored",
            description="The head at run time: `stored`, or quantized at load by rounding to nearest (`int8`: one "
            "scale a row; `int4`: symmetric groups of 32). The folder keeps its own head, so its size does not change.",
        )

        @model_validator(mode="after")
        def _does_something(self) -> Activation.Config:
            if self.dtype == "none" and self.lm_head == "stored":
                raise ValueError("dtype: none with lm_head: stored asks for nothing; leave the pass out")
            return self

    config: Config

    def plan(self, info: ModelInfo) -> PlanItem:
        """A refusal where the fused decoder does not understand the architecture or cannot be compiled here."""
        notes = ["only the native CPU engine has this; other engines say at load that it was not applied"]
        if self.config.dtype == "int8":
            notes.append("int8 activations enter linears with integer weights only; the run counts them")
        return PlanItem(
            summary=self._summary(),
            refusals=[reason for reason in (_no_compiler(), _not_understood(info)) if reason],
            notes=notes,
            runtime={"linear": self._spec().model_dump()},
        )

    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Write the specification. Raises RunError where the native engine could not honour it."""
        from ..runtime.kernels.build import unavailable_reason

        reason = _not_understood(context.info) or unavailable_reason()
        if reason:
            raise RunError(reason, where=self.name)
        if model.runtime.attention.backend != "auto":
            raise RunError(
                f"the attention backend {model.runtime.attention.backend} is asked for by name, and the native engine, "
                "which alone has int8 activations, has its own",
                where=self.name,
                what_to_do="Set flash_attention's backend to auto.",
            )
        integer, floating = count_linears(model.module)
        details = {**self._spec().model_dump(), "integer_linears": integer, "float_linears": floating}
        if self.config.dtype == "int8" and integer == 0:
            where = "the head alone" if self.config.lm_head != "stored" else "nothing"
            context.note("note", f"no linear has integer weights, so int8 activations change {where}: quantize first")
        model.runtime.linear = self._spec()
        return PassReport(f"{self._summary()}; {integer} integer and {floating} float linears", details)

    def _spec(self) -> LinearSpec:
        return LinearSpec(activation=self.config.dtype, lm_head=self.config.lm_head)

    def _summary(self) -> str:
        return f"activations {self.config.dtype}, head {self.config.lm_head} at run time"


def count_linears(module: nn.Module) -> tuple[int, int]:
    """Linear layers with integer weights (packed ones) and with float weights."""
    from torch import nn

    modules: list[Any] = list(module.modules())
    integer = sum(hasattr(m, "quant_state") for m in modules)
    return integer, sum(isinstance(m, nn.Linear) and not hasattr(m, "quant_state") for m in modules)


def _no_compiler() -> str | None:
    from ..runtime.kernels.build import NativeUnavailable, find_compiler

    try:
        find_compiler()
    except NativeUnavailable as error:
        return f"the native kernels cannot be built on this machine: {error}"
    return None


def _not_understood(info: ModelInfo) -> str | None:
    from ..runtime.recognize_config import unsupported_config

    return unsupported_config(info.config, info.trust_remote_code)
