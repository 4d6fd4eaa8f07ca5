"""llmopt: turn a language model and a recipe into a smaller, faster artifact that has proved itself, and run it.

The names below are imported when they are first used, so that `import llmopt` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "Artifact": "optimizer.artifact",
    "Completion": "runtime.llm",
    "Context": "optimizer.base",
    "Evaluation": "optimizer.evaluate",
    "Event": "optimizer.events",
    "Exporter": "optimizer.base",
    "GateError": "optimizer.errors",
    "LLM": "runtime.llm",
    "LlmoptError": "optimizer.errors",
    "LoadedModel": "optimizer.model",
    "ModelDiff": "optimizer.diff",
    "ModelInfo": "optimizer.model",
    "ModulePlan": "optimizer.base",
    "Options": "optimizer.base",
    "Pass": "optimizer.base",
    "PassReport": "optimizer.base",
    "PlanItem": "optimizer.base",
    "Recipe": "optimizer.recipe",
    "RunError": "optimizer.errors",
    "RuntimeSpec": "optimizer.runtime_spec",
    "UsageError": "optimizer.errors",
    "compare": "optimizer.compare",
    "diff": "optimizer.diff",
    "evaluate": "optimizer.evaluate",
    "load": "runtime.llm",
    "optimize": "optimizer.api",
    "register": "optimizer.registry",
    "tune": "optimizer.tune.tune",
}
_SUBPACKAGES = ("evaluation", "exporters", "optimizer", "passes", "runtime")

__all__ = sorted([*_NAMES, "__version__"])

if TYPE_CHECKING:
    from .optimizer.api import optimize
    from .optimizer.artifact import Artifact
    from .optimizer.base import Context, Exporter, ModulePlan, Options, Pass, PassReport, PlanItem
    from .optimizer.compare import compare
    from .optimizer.diff import ModelDiff, diff
    from .optimizer.errors import GateError, LlmoptError, RunError, UsageError
    from .optimizer.evaluate import Evaluation, evaluate
    from .optimizer.events import Event
    from .optimizer.model import LoadedModel, ModelInfo
    from .optimizer.recipe import Recipe
    from .optimizer.registry import register
    from .optimizer.runtime_spec import RuntimeSpec
    from .optimizer.tune.tune import tune
    from .runtime.llm import LLM, Completion, load


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(f".{_NAMES[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES, *_SUBPACKAGES])
