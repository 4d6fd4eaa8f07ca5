"""The plan: what each pass will do, from config and headers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .base import PlanItem
from .chain import check_chain
from .errors import LlmoptError, RunError, UsageError
from .model import ModelInfo
from .recipe import LoadedRecipe


@dataclass
class Plan:
    """The passes' plan items in order, and totals. Sizes are bytes of weights; `seconds` is rough."""

    items: list[tuple[str, PlanItem]]
    bytes_before: int
    bytes_after: int
    peak_memory: int
    seconds: float
    where: list[str]

    def raise_refusals(self) -> None:
        """Raise UsageError with the first refusal, and the number of others, where there is any."""
        refused = [(w, text) for w, (_, item) in zip(self.where, self.items) for text in item.refusals]
        if refused:
            where, text = refused[0]
            more = f"{len(refused) - 1} more: run `llmopt plan` to see them" if len(refused) > 1 else ""
            raise UsageError(text, where, more)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-serializable data."""
        return {
            "passes": [{"name": name, **asdict(item)} for name, item in self.items],
            **{key: getattr(self, key) for key in ("bytes_before", "bytes_after", "peak_memory", "seconds")},
        }


def make_plan(loaded: LoadedRecipe, info: ModelInfo) -> Plan:
    """Ask every pass for its plan. Raises UsageError where the passes do not fit together or a pattern is wrong."""
    check_chain(loaded)
    items, where = [], []
    for index, item in enumerate(loaded.passes):
        place = loaded.pass_where(index)
        try:
            items.append((item.name, item.plan(info)))
        except LlmoptError as error:
            if not error.where or error.where.startswith(item.name):
                error.where = f"{place}{error.where.removeprefix(item.name)}"
            raise
        where.append(place)
    exporter = loaded.exporter
    refused = exporter.refusals(info, [item for _, item in items], loaded.recipe.dtype)
    if refused:
        items.append((exporter.name, PlanItem("cannot write this model as asked", refusals=refused)))
        where.append(loaded.where("export", 0, loaded.recipe.export[0].use))
    before = info.weight_bytes
    after = before + sum(m.bytes_after - m.bytes_before for _, item in items for m in item.modules)
    if not any(item.refusals for _, item in items):
        after += exporter.added_bytes(info, [item for _, item in items])
    streams = all(stage.streams for stage in (*loaded.passes, loaded.exporter))
    peak = (_largest_part(info) if streams else before) + max((item.peak_memory for _, item in items), default=0)
    return Plan(items, before, after, peak, sum(item.seconds for _, item in items), where)


def _largest_part(info: ModelInfo) -> int:
    """Bytes of the weights that a run holds at once where all stages stream: of the widest block, or of what lies
    outside the blocks; of the whole model where it has no blocks.
    """
    from ..runtime.decoder_blocks import find_blocks

    try:
        name, _ = find_blocks(info.skeleton)
    except RunError:
        return info.weight_bytes
    parts: dict[str, int] = {}
    for tensor, entry in info.tensors.items():
        inside = tensor.startswith(f"{name}.")
        part = tensor[len(name) + 1 :].split(".", 1)[0] if inside else ""
        parts[part] = parts.get(part, 0) + entry.nbytes
    return max(parts.values(), default=0)
