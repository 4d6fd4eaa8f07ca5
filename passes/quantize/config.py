"""The options of the `quantize` pass. Their descriptions are the documentation that `llmopt passes quantize` prints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from ...optimizer.base import Options
from .auto.options import AutoOptions
from .schemes import figures

Method = Literal[
    "rtn", "hqq", "gptq", "awq", "smoothquant", "fp8", "mxfp4", "nvfp4", "bnb-nf4", "bnb-int8", "dynamic-int8"
]
Activations = Literal["none", "int8"]
CALIBRATED = frozenset({"gptq", "awq", "smoothquant"})
"""Methods that need calibration text; the others round a layer from its weight alone."""

LARGEST_GROUP = 2**20


def named_group_size(value: object) -> object:
    """-1 for `"channel"`; raises ValueError for true and false, which would count as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"group_size must be a number or 'channel', not {str(value).lower()}")
    return -1 if value == "channel" else value


def check_group_size(value: int | None) -> int | None:
    """Raises ValueError where a number is neither -1 nor a positive multiple of 8, or too large."""
    if value is None or value == -1:
        return value
    if value < 8 or value % 8:
        raise ValueError(f"group_size must be a positive multiple of 8, or -1 or 'channel', not {value}")
    if value > LARGEST_GROUP:
        raise ValueError(f"group_size must be {LARGEST_GROUP} at most, or -1 for one group a channel")
    return value


class Override(Options):
    """Settings of the modules that one pattern matches; what is not given is as in the main options."""

    method: Method | None = Field(None, description="As the main option, for these modules.")
    bits: int | None = Field(None, ge=2, le=8, description="As the main option, for these modules.")
    group_size: int | None = Field(None, description="As the main option, for these modules.")
    symmetric: bool | None = Field(None, description="As the main option, for these modules.")
    activations: Activations | None = Field(None, description="As the main option, for these modules.")
    skip: bool | None = Field(None, description="Leave these modules as they are, or, `false`, do not after all.")

    _named = field_validator("group_size", mode="before")(named_group_size)
    _group_size = field_validator("group_size")(check_group_size)


class Config(Options):
    """Quantization of linear layers: integers of 2 to 8 bits with scales of groups, W8A8, and 8- and 4-bit floats."""

    method: Literal[Method, "auto"] = Field(
        "rtn",
        description="`rtn` rounds each weight to the nearest code and needs no data; `hqq` fits each group's grid to "
        "its weights by half-quadratic splitting, outliers apart, without data (Badri & Shaji 2023); `gptq` also "
        "corrects the weights not yet rounded for the error made so far, on calibration text (Frantar et al. 2022). "
        "`awq` scales up input channels with large activations first, as far as that lowers the layers' output error, "
        "and folds the inverse into the norm or layer before (Lin et al. 2023); `smoothquant` moves activation "
        "outliers into weights so, and is W8A8 (Xiao et al. 2022); both then round as `rounding` says. "
        "Nearest values of floats, without data: `fp8` (W8A8, e4m3), `mxfp4` and `nvfp4` (4 bits, weight-only). "
        "For other libraries, one method for the whole model: `bnb-nf4` (4 bits, double quantization) and `bnb-int8` "
        "(LLM.int8(), outliers of 6 and above apart) in bitsandbytes' format, `dynamic-int8` (int8 weights and dynamic "
        "int8 inputs) in torchao's. "
        "`auto` gives every layer bits and a method of its own, by measured sensitivity and a limit: see `auto`.",
    )
    bits: int | None = Field(None, ge=2, le=8, description="Bits of a code: 4 by default, 8 where activations are too.")
    group_size: int | None = Field(
        None,
        description="Input columns that share a scale: a multiple of 8, or -1 (`channel`) for one scale per output "
        "channel. Smaller groups are more exact and larger. By default 64, for W8A8 `channel`; mxfp4 has 32 and nvfp4 "
        "16. With fp8, 128 stands for blocks of 128 x 128 weights and groups of 128 inputs.",
    )
    symmetric: bool | None = Field(
        None,
        description="Whether codes are symmetric around zero, as they are by default. An asymmetric grid also stores a "
        "zero point of `bits` bits for each group, and is more exact.",
    )
    activations: Activations = Field(
        "none",
        description="`int8`: W8A8, that is 8-bit symmetric weights with one scale a channel, and inputs that every "
        "engine quantizes at run time, one scale a token. fp8 quantizes its inputs always.",
    )
    auto: AutoOptions | None = Field(
        None, description="auto: the limit, and what to choose from. `overrides` may take layers out by a `method`."
    )
    ignore: list[str] = Field(
        default_factory=list,
        description="Modules to leave as they are: globs such as `*.mlp.*`, or `re:` and a regular expression, on full "
        "module names. A pattern that matches nothing is an error.",
    )
    overrides: dict[str, Override] = Field(
        default_factory=dict,
        description="Other settings by module pattern: any of `bits`, `group_size`, `symmetric`, `method`, `skip`. "
        "Where several patterns match a module, the later one wins, setting by setting.",
    )
    lm_head: Literal["keep", "quantize"] = Field(
        "keep", description="Whether the output head is quantized. It is left as it is unless asked for."
    )
    experts: Literal["keep", "quantize", "always"] = Field(
        "quantize",
        description="Whether the experts of mixture-of-experts blocks are quantized, as the single linear layers that "
        "most checkpoints have (`*.experts.0.gate_proj` …). `quantize` leaves those alone that plain transformers "
        "opens only as one tensor (gpt_oss); `always` makes single layers of them too, and such an artifact opens in "
        "llmopt and in engines that look for single experts; plain transformers would give it random experts. With "
        "calibration, an expert that fewer than `min_tokens` tokens reach is an error unless `few_tokens` says "
        "otherwise.",
    )
    untie: bool = Field(
        False,
        description="Let `lm_head: quantize` give a head that is tied to the input embeddings a packed copy of its "
        "own. The embeddings stay, so that the model grows by the size of that copy.",
    )
    indivisible: Literal["error", "smaller_group"] = Field(
        "error",
        description="What to do with layers whose input features the group size does not divide: refuse, or take for "
        "each of them the largest multiple of 8 below the group size that does, which is reported.",
    )
    scale_search: int = Field(
        10,
        ge=0,
        le=200,
        description="Ranges tried for each group, besides its full one and a least-squares fit; the least squared "
        "error wins (weighted by the squared inputs where there is calibration). 0 takes the full range. hqq has a "
        "search of its own.",
    )
    rounding: Literal["nearest", "gptq"] = Field(
        "nearest",
        description="awq, smoothquant: how scaled weights are rounded: to the nearest code of a grid whose range is "
        "searched (`scale_search`), or by gptq with its options, which is more exact and slower.",
    )
    scale_steps: int = Field(
        20,
        ge=1,
        le=100,
        description="awq, smoothquant: exponents between 0 and 1 tried for a layer's scales. awq tries every second "
        "one, then the two beside the best.",
    )
    desc_act: bool = Field(
        True, description="gptq: round the columns with the largest inputs first (activation order)."
    )
    static_groups: bool = Field(
        True,
        description="gptq: fix all scales before the first column is rounded, so that activation order leaves columns "
        "in their plain groups. Activation order without it is stored as a GPTQ checkpoint only (the exporter's "
        "`quantization_format: gptq`).",
    )
    damping: float = Field(
        0.01,
        gt=0,
        le=1,
        description="gptq: share of the Hessian's mean diagonal that is added to it. Raised by a layer that does not "
        "factorize, up to 1, and reported; beyond that the run fails.",
    )
    block_size: int = Field(64, ge=8, le=1024, description="gptq: columns rounded between two updates of the rest.")
    true_sequential: bool | None = Field(
        None,
        description="gptq: calibrate the layers inside a block one after another, each on the quantized output of "
        "those before. By default that is done where it takes a single pass over the block (nearly every dense "
        "decoder, unless `match_original` follows the unquantized one); elsewhere all layers of a block are calibrated "
        "on its unquantized layers. `true` does so everywhere, if need be by more passes; `false` nowhere.",
    )
    match_original: float = Field(
        0.0,
        ge=0,
        le=1,
        description="gptq, experimental: how far each layer is fitted to the outputs of the unquantized model instead "
        "of its own, to make up for the layers before it (after GPTAQ, Li et al. 2025). 0 is plain GPTQ. It overfits "
        "short calibration texts: at 1.0 on 8,192 tokens a 30-layer model was ruined. Gate the result.",
    )
    learn_steps: int = Field(
        0,
        ge=0,
        le=10_000,
        description="gptq, awq: after a block's layers are rounded, this many steps of descent move their codes and "
        "scales until the block's outputs come closer to those of the original model (as in SignRound, Cheng "
        "et al. 2023). 0: none. 100 to 400 are usual; every step costs about three forward passes of one batch "
        "(`batch_tokens`) through the block, so that they take more time than everything else together.",
    )
    min_tokens: int = Field(
        1,
        ge=1,
        description="Methods that calibrate: tokens that have to reach a layer. Experts of a mixture that the text "
        "hardly uses see few; a Hessian of fewer tokens than the layer has inputs fits only those.",
    )
    few_tokens: Literal["error", "rtn"] = Field(
        "error",
        description="What becomes of a layer that fewer than `min_tokens` reach: the run fails, or the layer is "
        "rounded to nearest, which is reported as a fallback.",
    )
    batch_tokens: int = Field(
        4096, ge=1, description="gptq: calibration tokens that run through a block at once, at least one sequence."
    )

    _named = field_validator("group_size", mode="before")(named_group_size)
    _group_size = field_validator("group_size")(check_group_size)

    @model_validator(mode="after")
    def _figures(self) -> Config:
        """What is not given becomes the method's default, so that the recipe as run spells it out."""
        self._auto()
        self._learns()
        found = figures(self.method, self.bits, self.group_size, self.symmetric, self.activations)
        self.bits, self.group_size, self.symmetric = found["bits"], found["group_size"], bool(found["symmetric"])
        if self.auto is not None:
            self.bits = None
        return self

    def _learns(self) -> None:
        """Raises ValueError where rounding is to be learned and cannot be."""
        if not self.learn_steps:
            return
        if self.method not in ("gptq", "awq") or self.activations != "none":
            raise ValueError("`learn_steps` is for `method: gptq` and `method: awq`, with float activations")
        if self.match_original:
            raise ValueError("`learn_steps` and `match_original` both follow the original model: choose one")
        if self.desc_act and not self.static_groups:
            raise ValueError("`learn_steps` needs `static_groups: true` beside activation order")

    def _auto(self) -> None:
        """Raises ValueError where `method: auto` and the options beside it do not fit together."""
        if (self.method == "auto") != (self.auto is not None):
            raise ValueError("`method: auto` and the section `auto`, which holds its limit, belong together")
        if self.auto is None:
            return
        if self.bits is not None:
            raise ValueError("`method: auto` chooses the bits: leave `bits` out, or list some in `auto.bits`")
        if self.symmetric is False or self.activations != "none":
            raise ValueError("`method: auto` mixes grids, which have to be symmetric and weight-only to be loaded")
        if self.desc_act and not self.static_groups:
            raise ValueError("`method: auto` with activation order needs `static_groups: true`")
        for pattern, override in self.overrides.items():
            if override.bits is not None and override.method is None:
                raise ValueError(f"with `method: auto` the override {pattern!r} needs a `method` beside its `bits`")
            if override.group_size is not None and override.method is None and self.auto.group_sizes is not None:
                raise ValueError(f"the override {pattern!r} gives a `group_size`, and `auto.group_sizes` others")
        if self.auto.group_sizes is not None:
            if self.group_size not in (None, *self.auto.group_sizes):
                raise ValueError("give `group_size` or `auto.group_sizes`, not both")
            self.group_size = self.group_size or min((s for s in self.auto.group_sizes if s > 0), default=-1)
