"""Which modules are quantized and how, decided from the configuration and the model's description alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import UsageError
from ...runtime.checkpoint_names import converted
from ...runtime.kernels.packed import QuantScheme
from ...runtime.plain_readers import asks_for_weight
from .config import CALIBRATED
from .libraries import library_notes, library_refusals
from .moe import expert_notes, expert_refusals, quantizable_experts
from .patterns import select
from .schemes import OWN_INPUTS, make_scheme

if TYPE_CHECKING:
    from ...optimizer.model import ModelInfo
    from .config import Config, Override

FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Target:
    """One module to quantize. `asked_group_size` differs from the scheme's where the policy made the group smaller."""

    name: str
    out_features: int
    in_features: int
    scheme: QuantScheme
    method: str
    asked_group_size: int
    untied: bool = False

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features


@dataclass
class Targets:
    """What the configuration comes to for one model."""

    modules: list[Target] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def smaller_groups(self) -> list[Target]:
        return [t for t in self.modules if t.scheme.group_size != t.asked_group_size]


def resolve(config: Config, info: ModelInfo) -> Targets:
    """Apply ignore, overrides, head and group-size policy to every nn.Linear of the model.

    Raises UsageError where a pattern matches nothing; everything else that stands in the way becomes a refusal.
    """
    shapes, head = dict(info.linear_shapes), info.output_embedding_name
    out = Targets()
    experts = quantizable_experts(info, config.experts == "always") if config.experts != "keep" else {}
    shapes |= experts
    if not _source_can_be_quantized(info, out):
        return out
    names = list(shapes)
    ignored = {name for pattern in config.ignore for name in select(pattern, names, "quantize.ignore")}
    matched = {pattern: select(pattern, names, "quantize.overrides") for pattern in config.overrides}
    overrides: dict[str, list[Override]] = {}
    for pattern, override in config.overrides.items():
        for name in matched[pattern]:
            overrides.setdefault(name, []).append(override)

    gates = _gates(shapes, matched)
    indivisible: list[str] = []
    for name, (rows, columns) in shapes.items():
        settings = _settings(config, overrides.get(name, []))
        if name in ignored or settings["skip"]:
            out.skipped.append(name)
            continue
        if name in gates:
            out.skipped.append(name)
            continue
        untied = False
        if name == head:
            if config.lm_head == "keep":
                out.skipped.append(name)
                continue
            if _is_tied(info, name):
                untied = config.untie
                if not untied:
                    out.refusals.append(
                        f"{name} is tied to the input embeddings, which stay as they are, so it cannot be quantized "
                        "alone: set `untie: true` (behind a pass that unties it, too) to store a packed copy of it, or "
                        "`lm_head: keep`"
                    )
                    continue
        if settings["method"] == "auto" and config.auto is not None and config.auto.group_sizes is not None:
            settings["group_size"] = _first_usable(config.auto.group_sizes, columns)
        scheme = _scheme(name, settings)
        asked = scheme.group_size
        if asked != -1 and columns % asked and not scheme.spans_rows:
            smaller = _largest_divisor(columns, asked)
            if config.indivisible == "error" or smaller is None or settings["method"] in ("mxfp4", "nvfp4"):
                indivisible.append(f"{name} ({columns} input features, group size {asked})")
                continue
            scheme = replace(scheme, group_size=smaller)
        if _moves_groups(config, settings["method"], scheme, columns):
            scheme = replace(scheme, g_idx=True)
        out.modules.append(Target(name, rows, columns, scheme, settings["method"], asked, untied))

    if indivisible:
        out.refusals.append(
            f"the group size does not divide the input features of {len(indivisible)} modules: "
            f"{', '.join(indivisible)}. Set a group size that divides them, `indivisible: smaller_group`, or ignore "
            "these modules"
        )
    schemes = {t.scheme for t in out.modules}
    if len(schemes) > 1 and not all(scheme.symmetric for scheme in schemes):
        out.refusals.append(
            f"{len(schemes)} different schemes, an asymmetric one among them: transformers loads an asymmetric "
            "model only if all its modules share one scheme. Use one scheme, or set `symmetric: true` for all"
        )
    out.refusals += _idle_overrides(config, matched, set(out.skipped))
    out.refusals += _follows_experts(config, out.modules, experts)
    out.refusals += library_refusals(out.modules, info)
    out.notes += library_notes(out.modules)
    schemes_of = {target.name: target.scheme for target in out.modules}
    out.refusals += expert_refusals(info, experts, schemes_of, asked=config.experts != "keep")
    if not out.modules and not out.refusals:
        out.refusals.append("no module is left to quantize: every linear layer is ignored, skipped or the kept head")
    if gates:
        out.notes.append(
            f"{len(gates)} layers with one output ({gates[0]} …), gates that engines run unquantized, stay as they are"
        )
    _add_notes(out, info)
    return out


def _gates(shapes: Mapping[str, tuple[int, int]], matched: Mapping[str, list[str]]) -> list[str]:
    """Layers of one output, but for those that an override asks for by a pattern that matches nothing else."""
    gates = {name for name, (rows, _) in shapes.items() if rows == 1}
    asked = {name for names in matched.values() if gates.issuperset(names) for name in names}
    return [name for name in shapes if name in gates - asked]


def _source_can_be_quantized(info: ModelInfo, out: Targets) -> bool:
    """Refuse sources that are quantized already, or whose layers compressed-tensors cannot express."""
    quantization = getattr(info.config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        out.refusals.append(f"the source is quantized already ({method}): start from the model it was made of")
        return False
    changed = converted(info.skeleton, info.tensors)
    if changed is not None:
        out.refusals.append(
            f"transformers merges, splits or permutes tensors of this architecture as it loads them ({changed}), which "
            "quantized folders are not read with: it cannot be quantized"
        )
        return False
    conv = [n for n, m in info.skeleton.named_modules() if type(m).__name__ == "Conv1D" and hasattr(m, "nf")]
    if conv:
        out.refusals.append(
            f"{len(conv)} of the model's layers are Conv1D ({conv[0]} …), whose transposed weights the "
            "compressed-tensors format cannot express: this architecture cannot be quantized"
        )
        return False
    return True


def _settings(config: Config, overrides: list[Override]) -> dict[str, Any]:
    """A module's settings. An override to a format with figures of its own drops those that it would inherit."""
    keys = ("method", "bits", "group_size", "symmetric", "activations")
    settings: dict[str, Any] = {key: getattr(config, key) for key in keys} | {"skip": False}
    for override in overrides:
        if override.method in {*OWN_INPUTS, "smoothquant"} or override.activations == "int8":
            settings.update(dict.fromkeys(("bits", "group_size", "symmetric")), activations="none")
        settings.update({key: value for key in keys if (value := getattr(override, key)) is not None})
        if override.skip is not None:
            settings["skip"] = override.skip
    return settings


def _scheme(name: str, settings: dict[str, Any]) -> QuantScheme:
    try:
        return make_scheme(**{key: value for key, value in settings.items() if key != "skip"})
    except ValueError as error:
        raise UsageError(str(error), where=f"quantize.overrides, for {name}") from None


def _moves_groups(config: Config, method: str, scheme: QuantScheme, columns: int) -> bool:
    """Whether gptq rounds it in activation order without static groups, so that columns of a group lie apart."""
    by_gptq = method == "gptq" or (method == "awq" and config.rounding == "gptq")
    ordered = config.desc_act and not config.static_groups
    return by_gptq and ordered and scheme.format == "pack-quantized" and scheme.group_size not in (-1, columns)


def _idle_overrides(config: Config, matched: Mapping[str, list[str]], kept: set[str]) -> list[str]:
    """A refusal for each override without `skip` all of whose modules are left as they are."""
    return [
        f"the override {pattern!r} changes nothing: all modules that it matches ({names[0]}"
        f"{' …' if len(names) > 1 else ''}) are left as they are, by `ignore`, `skip` or `lm_head: keep`"
        for pattern, names in matched.items()
        if names and not config.overrides[pattern].skip and kept.issuperset(names)
    ]


def _follows_experts(config: Config, modules: list[Target], experts: Mapping[str, object]) -> list[str]:
    """A refusal of `match_original` for experts: the unquantized model's router sends other tokens to them."""
    followed = [t.name for t in modules if t.name in experts and t.method in CALIBRATED]
    if not config.match_original or not followed:
        return []
    return [
        f"`match_original` compares a layer's inputs with the unquantized model's, token by token, and an expert "
        f"({followed[0]}) is not sent the same tokens there: leave it out, or give the experts a method without "
        "calibration by `overrides`"
    ]


def _is_tied(info: ModelInfo, head: str) -> bool:
    return info.skeleton.get_submodule(head).weight is info.skeleton.get_input_embeddings().weight


def _largest_divisor(columns: int, group_size: int) -> int | None:
    """The largest multiple of 8 not above `group_size` that divides `columns`."""
    return next((size for size in range(group_size // 8 * 8, 0, -8) if columns % size == 0), None)


def _first_usable(group_sizes: list[int], columns: int) -> int:
    """The first size that divides `columns`; -1 where none does, which the search refuses by name."""
    return next((size for size in group_sizes if size > 0 and columns % size == 0), -1)


def _add_notes(out: Targets, info: ModelInfo) -> None:
    for target in out.smaller_groups:
        out.notes.append(
            f"{target.name}: group size {target.scheme.group_size} instead of {target.asked_group_size}, which "
            f"does not divide {target.in_features} input features"
        )
    if any(not t.scheme.symmetric for t in out.modules):
        out.notes.append(
            "asymmetric weights load in transformers from 5.23 on (before, only with compressed-tensors up to 0.17); "
            "symmetric ones load in all"
        )
    if info.not_called_as_linear:
        out.notes.append(
            f"{len(info.not_called_as_linear)} modules derive from nn.Linear and are not called as linear layers "
            f"({info.not_called_as_linear[0]} …): they stay as they are"
        )
    out.notes += expert_notes(info, [target.name for target in out.modules])
    without_weight = [target.name for target in out.modules if target.scheme.format.endswith("pack-quantized")]
    asking = asks_for_weight(info.skeleton, without_weight) if without_weight else None
    if asking is not None:
        out.notes.append(
            f"plain transformers does not open packed layers of this architecture: initializing {asking} it asks for a "
            "`weight`, which they do not have. llmopt does; `fp8`, `smoothquant` and `activations: int8` keep one, for "
            "transformers too"
        )
    odd = sorted({t.scheme.bits for t in out.modules} - {2, 4, 8})
    if odd:
        out.notes.append(
            f"{', '.join(map(str, odd))}-bit codes are packed as compressed-tensors 0.18 and later read them; older "
            "readers, vLLM releases among them, cannot"
        )
