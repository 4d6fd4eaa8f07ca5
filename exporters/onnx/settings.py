"""The options of the exporter `onnx`, and what they come to for one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ...optimizer.base import Options
from ...optimizer.runtime_spec import LinearSpec

Flavor = Literal["genai", "ort"]
Activations = Literal["auto", "float", "int8"]
Dtype = Literal["float32", "float16", "bfloat16"]
HeadFormat = Literal["auto", "stored", "int8", "int4"]


class OnnxOptions(Options):
    """Options of the exporter `onnx`."""

    flavor: Flavor = Field(
        "genai",
        description="`genai`: GroupQueryAttention, for onnxruntime-genai and `llmopt.load`. `ort`: standard operators "
        "for attention, inputs and outputs named as optimum names them, for optimum and transformers.js too.",
    )
    dtype: Dtype = Field(
        "float32",
        description="Weights that are not quantized. `bfloat16` is stored so and computed in float32: half the file. "
        "`float16` is computed in float16, keys and values too.",
    )
    activations: Activations = Field(
        "auto",
        description="What enters the products with packed integer weights: `float`, or `int8`, rounded at run time in "
        "blocks (MatMulNBits, accuracy level 4: faster, less exact). `auto` is what the artifact's RuntimeSpec says.",
    )
    lm_head: HeadFormat = Field(
        "auto",
        description="The head, and the embedding where both are one: as `stored`, or rounded to `int8` or `int4` in "
        "blocks of 32. `auto` is what the artifact's RuntimeSpec says.",
    )
    share_head: bool = Field(
        False,
        description="The embedding reads the codes of a rounded head: smaller, and less exact, above all in int4.",
    )
    external_data: bool = Field(
        True, description="Put weights into model.onnx_data. Without it everything is in model.onnx, below 2 GB."
    )
    simplify: bool = Field(
        False,
        description="Have onnxruntime simplify the graph before it is proved (its basic level). It does so at every "
        "load, which this makes shorter.",
    )
    gate_tokens: int = Field(32, ge=1, le=512, description="Tokens of each prompt's continuation in the proof.")


@dataclass(frozen=True)
class Choices:
    """What `auto` came to. accuracy_level: of MatMulNBits, 0: computed as the inputs' type, 4: with int8 inputs."""

    flavor: Flavor
    dtype: Dtype
    accuracy_level: int
    lm_head: str
    share_head: bool = False

    @classmethod
    def of(cls, options: OnnxOptions, spec: LinearSpec) -> Choices:
        int8 = spec.activation == "int8" if options.activations == "auto" else options.activations == "int8"
        head = spec.lm_head if options.lm_head == "auto" else options.lm_head
        return cls(options.flavor, options.dtype, 4 if int8 else 0, head, options.share_head)

    @property
    def exact(self) -> bool:
        """Whether everything is computed in float32 from the stored values."""
        return self.dtype != "float16" and self.accuracy_level == 0
