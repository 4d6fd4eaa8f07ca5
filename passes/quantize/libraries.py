"""What the plan refuses of the methods whose folders another library opens: bitsandbytes and torchao."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...optimizer.model import ModelInfo
    from .targets import Target

LIBRARIES = {"bnb-nf4": "bitsandbytes", "bnb-int8": "bitsandbytes", "dynamic-int8": "torchao"}
"""Method → the distribution, and the extra of this package, that transformers opens the folder with."""


def library_refusals(targets: list[Target], info: ModelInfo) -> list[str]:
    """Why these targets could not be written, or not be opened afterwards, in sentences."""
    from torch import nn

    methods = sorted({target.method for target in targets} & set(LIBRARIES))
    refusals = [
        f"`method: {method}` writes a folder that transformers opens with {name}, which is not installed: "
        f"pip install 'llmopt[{name}]'"
        for method in methods
        if find_spec(name := LIBRARIES[method]) is None
    ]
    if not methods:
        return []
    others = sorted({target.method for target in targets} - {methods[0]})
    if others:
        refusals.append(
            f"`method: {methods[0]}` beside {', '.join(others)}: {LIBRARIES[methods[0]]}'s entry in config.json has "
            "one method for all layers. Use one method, and `ignore` or `skip` for layers to leave as they are"
        )
    modules = dict(info.skeleton.named_modules())
    odd = [target.name for target in targets if type(modules.get(target.name, nn.Linear(1, 1))) is not nn.Linear]
    if odd:
        refusals.append(
            f"{odd[0]} is a {type(modules[odd[0]]).__name__}, and transformers gives only plain nn.Linear layers to "
            f"{LIBRARIES[methods[0]]}: ignore it"
        )
    return refusals


def library_notes(targets: list[Target]) -> list[str]:
    """What to know of these targets' results, in sentences."""
    notes = []
    odd = [t.name for t in targets if t.method == "bnb-nf4" and (t.in_features % 64 or t.out_features % 32)]
    if odd:
        notes.append(
            f"{len(odd)} layers ({odd[0]} …) have inputs that are no multiple of 64 or outputs that are none of 32: "
            "bitsandbytes 0.50 reads such ones wrong, or not at all, on a CPU; `llmopt.load` reads them"
        )
    if any(target.method == "bnb-int8" for target in targets):
        notes.append(
            "LLM.int8() takes columns with outliers in any row of a call apart, so that a token's values depend a "
            "little on what it is batched with"
        )
    return notes
