"""From a method's name and what was asked for beside it to the scheme of a weight, with each method's own defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...runtime.kernels.packed import QuantScheme

DEFAULTS: dict[str, int] = {"bits": 4, "group_size": 64, "symmetric": True}
W8A8: dict[str, int] = {"bits": 8, "group_size": -1, "symmetric": True}
FLOAT4_GROUPS = {"mxfp4": 32, "nvfp4": 16}
LIBRARY_FORMATS = {"bnb-nf4": "bitsandbytes-nf4", "bnb-int8": "bitsandbytes-int8", "dynamic-int8": "torchao-int8"}
"""Method → format of another library's own."""
OWN_INPUTS = frozenset({"fp8", *FLOAT4_GROUPS, *LIBRARY_FORMATS})
"""Methods that settle what becomes of a layer's inputs."""


def fixed_figures(method: str, activations: str) -> dict[str, int]:
    """What a method or format leaves no choice of, by option: `bits`, `group_size`, `symmetric`."""
    if method in FLOAT4_GROUPS:
        return {**DEFAULTS, "group_size": FLOAT4_GROUPS[method]}
    if method in LIBRARY_FORMATS:
        return DEFAULTS if method == "bnb-nf4" else W8A8
    if method == "fp8":
        return {"bits": 8, "symmetric": True}
    return W8A8 if activations == "int8" or method == "smoothquant" else {}


def figures(
    method: str,
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    activations: str = "none",
) -> dict[str, int]:
    """`bits`, `group_size` and `symmetric`, with the method's defaults for None.

    Raises ValueError where an option contradicts the method or the activations.
    """
    if activations == "int8" and method in OWN_INPUTS:
        raise ValueError(f"`activations: int8` is for integer weights, not for `method: {method}`")
    if activations == "int8" and method == "awq":
        raise ValueError("`method: awq` looks at weights alone: with `activations: int8` take `method: smoothquant`")
    asked = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    given = {option: value for option, value in asked.items() if value is not None}
    for option, value in fixed_figures(method, activations).items():
        if given.get(option, value) != value:
            cause = "activations: int8" if activations == "int8" else f"method: {method}"
            raise ValueError(f"`{cause}` has {option} {_shown(value)}, not {_shown(given[option])}: leave {option} out")
    return {**(W8A8 if method == "fp8" else DEFAULTS), **fixed_figures(method, activations), **given}


def make_scheme(method: str, activations: str = "none", **asked: Any) -> QuantScheme:
    """The scheme for what `figures` makes of the options. Raises ValueError as it does."""
    from ...runtime.kernels import formats
    from ...runtime.kernels.float4 import Float4Scheme
    from ...runtime.kernels.packed import QuantScheme
    from ...runtime.kernels.scaled import ScaledScheme

    values: dict[str, Any] = figures(method, activations=activations, **asked)
    if method in FLOAT4_GROUPS:
        return Float4Scheme.of(method)
    if method in LIBRARY_FORMATS:
        return formats.make_scheme(LIBRARY_FORMATS[method], **values)
    if method in ("fp8", "smoothquant") or activations == "int8":
        return ScaledScheme(group_size=values["group_size"], kind="float8" if method == "fp8" else "int8")
    return QuantScheme(**values)


def describe(scheme: QuantScheme) -> str:
    """The scheme in a few words, such as `W4 g64 sym` or `W8A8 float8 channel`."""
    group = "channel" if scheme.group_size == -1 else f"g{scheme.group_size}"
    if scheme.format == "pack-quantized":
        order = " act order" if scheme.g_idx else ""
        return f"W{scheme.bits} {group} {'sym' if scheme.symmetric else 'asym'}{order}"
    if scheme.format in ("int-quantized", "float-quantized"):
        block = group if scheme.group_size == -1 else f"block {scheme.group_size} x {scheme.group_size}"
        return f"W8A8 {'int8' if scheme.format == 'int-quantized' else 'float8'} {block}"
    if scheme.format in LIBRARY_FORMATS.values():
        return f"W{scheme.bits} {scheme.format} {group}"
    return f"{scheme.format.removesuffix('-pack-quantized')} {group}"


def _shown(value: object) -> str:
    return "channel" if value == -1 else str(value).lower()
