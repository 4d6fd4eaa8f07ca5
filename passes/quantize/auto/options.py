"""The options of `method: auto`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ....optimizer.base import Options

KEEP = 16
"""What stands among the bits for a layer that stays as it is."""

AutoMethod = Literal["rtn", "hqq", "gptq", "awq"]


class AutoOptions(Options):
    """What `method: auto` may choose from, and the limit that it keeps. Exactly one of the three limits is given."""

    target_bits: float | None = Field(
        None,
        gt=0,
        le=16,
        allow_inf_nan=False,
        description="Average bits per weight, as stored, over the layers whose bits are chosen: codes and scales, kept "
        "layers with all their bits. Embeddings, and a head that is kept, do not count. Uniform 4 bits in groups of "
        "64 with 16-bit scales are 4.25 in this count. The error is the least that the search finds within the limit.",
    )
    target_size: int | None = Field(
        None,
        gt=0,
        description="Bytes of all tensors of the model after the pass, embeddings and head included, such as `80 MB` "
        "(of 1000 x 1000 bytes). The error is the least that the search finds within the limit.",
    )
    max_mean_kl: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Mean KL(source || quantized) a token, in nats, on calibration text that a trial was not "
        "calibrated on. The size is the least that the search finds; a trial of the whole model has shown that the "
        "limit holds with 95% confidence. Gates judge the artifact itself, on the evaluation text.",
    )
    bits: list[int] = Field(
        default=[2, 3, 4, 5, 6, 7, 8, KEEP],
        min_length=1,
        description="Bits of a code to choose from, 2 to 8; 16 stands for a layer that stays as it is. Engines other "
        "than llmopt may read 4 and 8 only.",
    )
    methods: list[AutoMethod] = Field(
        default=["gptq"], min_length=1, description="Methods to choose from. Their own options are those of the pass."
    )
    group_sizes: list[int] | None = Field(
        None,
        min_length=1,
        description="Group sizes to choose from, as `group_size`; none takes `group_size` alone. Those that do not "
        "divide a layer's input features are left out for that layer.",
    )
    fused: Literal["share", "free"] = Field(
        "share",
        description="Whether layers that engines run as one (query, key and value; gate and up) share bits, method "
        "and group size, as most engines need it, or are free.",
    )
    tokens: int = Field(
        8192, ge=1, description="Calibration tokens on which sensitivities are measured, at least one sequence."
    )
    trials: int = Field(
        5, ge=1, le=20, description="max_mean_kl: how many whole quantizations of the model are tried and measured."
    )

    @field_validator("target_size", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        from ....runtime.memory import parse_size

        return parse_size(value) if isinstance(value, str) else value

    @field_validator("bits")
    @classmethod
    def _bits(cls, value: list[int]) -> list[int]:
        for bits in value:
            if bits != KEEP and not 2 <= bits <= 8:
                raise ValueError(f"bits must be 2 to 8, or {KEEP} for a layer that stays as it is, not {bits}")
        if value == [KEEP]:
            raise ValueError(f"{KEEP} alone leaves every layer as it is: give bits from 2 to 8 too")
        return sorted(set(value))

    @field_validator("group_sizes", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        from ..config import named_group_size

        return [named_group_size(size) for size in value] if isinstance(value, list) else value

    @field_validator("group_sizes")
    @classmethod
    def _groups(cls, value: list[int] | None) -> list[int] | None:
        from ..config import check_group_size

        for size in value or ():
            check_group_size(size)
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> AutoOptions:
        """Raises ValueError unless there is exactly one limit."""
        limits = ("target_bits", "target_size", "max_mean_kl")
        given = [name for name in limits if getattr(self, name) is not None]
        if len(given) != 1:
            named = f", not {' and '.join(given)}" if given else ""
            raise ValueError(f"auto needs one limit of {', '.join(limits)}{named}")
        return self
