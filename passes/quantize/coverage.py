"""Layers that too few calibration tokens reach, such as the experts that a text hardly uses.

A Hessian of fewer rows than it has columns is singular and fits only the tokens it has seen; with no row at all there
is nothing to fit. What happens to such a layer is declared (`few_tokens`), never silent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError
from .apply import rtn_module
from .rounding import round_group

if TYPE_CHECKING:
    from torch import nn

    from .config import Config
    from .hessian import InputGroup
    from .targets import Target


def round_covered(model: nn.Module, targets: list[Target], group: InputGroup, config: Config) -> list[dict[str, Any]]:
    """`round_group`, with the number of tokens in each line; below `min_tokens` as `few_tokens` says.

    Raises RunError where that is `error`, and what `round_group` does.
    """
    tokens = group.hessian.rows
    if tokens >= config.min_tokens:
        return [{**line, "tokens": tokens} for line in round_group(model, targets, group, config)]
    names = ", ".join(target.name for target in targets)
    if config.few_tokens == "error":
        raise RunError(
            f"{tokens or 'no'} calibration token{'' if tokens == 1 else 's'} reached the module, and `min_tokens` is "
            f"{config.min_tokens}",
            where=names,
            what_to_do="Calibrate on more text, set `few_tokens: rtn`, or give this module `method: rtn` in "
            "`overrides`.",
        )
    nearest = [replace(target, method="rtn") for target in targets]
    return [{**rtn_module(model, target, config.scale_search), "tokens": tokens} for target in nearest]


def few_tokens_note(lines: list[dict[str, Any]], config: Config) -> str | None:
    """What to tell of the layers that fell back, or None."""
    fell = [line for line in lines if line.get("tokens", config.min_tokens) < config.min_tokens]
    if not fell:
        return None
    least = min(fell, key=lambda line: line["tokens"])
    return (
        f"{len(fell)} layers were reached by fewer than {config.min_tokens} calibration tokens and were rounded to "
        f"nearest (`few_tokens: rtn`), the fewest {least['tokens']} ({least['name']})"
    )
