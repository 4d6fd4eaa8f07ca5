"""`llmopt.optimize`: the Python entrance to the pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .artifact import Artifact
from .base import Exporter, Pass
from .errors import UsageError
from .events import Listener, silent
from .files import cache_dir
from .recipe import LoadedRecipe, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PassLike = Pass | type[Pass] | str | dict[str, Any]


def optimize(
    model: str | Path | PreTrainedModel | None = None,
    recipe: str | Path | dict[str, Any] | None = None,
    *,
    passes: Sequence[PassLike] | None = None,
    exporter: Exporter | str | None = None,
    out: str | Path | None = None,
    overrides: Iterable[str] = (),
    revision: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    keep_failed: bool = False,
    cache: bool = True,
    cache_folder: str | Path | None = None,
    cache_limit: int = 20 * 2**30,
    report: bool = True,
    listener: Listener = silent,
    **settings: Any,
) -> Artifact:
    """Run a recipe over a model and return the artifact with its report.

    model: a folder, hub id, .gguf file or short name; or a model in memory, then with its `tokenizer`.
    recipe: a shipped recipe's name, a YAML file or a dict of the same form. passes: instead of a recipe, Pass
    instances, Pass classes, names, or `{name: options}`, in order. settings: other keys of a recipe (`gates`,
    `calibration`, `evaluate`, `seed`, `dtype`). overrides: `--set` assignments, such as "passes.quantize.bits=8".
    out: the artifact's folder; by default named after model and recipe, in the working directory.
    cache_limit: bytes of cached pass results. report: write report.html into the artifact.
    listener: receives an `Event` for everything that happens.

    Raises UsageError where the request is wrong, RunError where the run fails, GateError where a gate does not hold.
    """
    loaded = load_recipe(recipe, passes, exporter, overrides, settings)
    folder = Path(cache_folder) if cache_folder else cache_dir()
    from .files import scratch_folder
    from .pipeline import Run, Settings
    from .sources import resolve

    def run(named: str | Path) -> Artifact:
        source = resolve(named, revision or loaded.recipe.revision)
        target = Path(out) if out is not None else Path(default_out(str(named), loaded.recipe.name))
        run_settings = Settings(
            target, force, keep_failed, trust_remote_code, cache, folder, cache_limit, listener, report
        )
        return Run(loaded, source, run_settings).execute()

    if model is not None and not isinstance(model, (str, Path)):
        return _with_saved(model, tokenizer, folder, run, scratch_folder)
    named = model or loaded.recipe.model
    if not named:
        raise UsageError("no model is named", what_to_do="Pass --model PATH_OR_HUB_ID or set `model:` in the recipe")
    return run(named)


def load_recipe(
    recipe: str | Path | dict[str, Any] | None,
    passes: Sequence[PassLike] | None = None,
    exporter: Exporter | str | None = None,
    overrides: Iterable[str] = (),
    settings: dict[str, Any] | None = None,
) -> LoadedRecipe:
    """A validated recipe from a file, a name, a dict, or a list of passes. Raises UsageError."""
    if (recipe is None) == (passes is None):
        raise UsageError("give either a recipe or a list of passes", "optimize")
    if passes is None and not isinstance(recipe, dict):
        extra = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in (settings or {}).items()]
        loaded = Recipe.load(recipe, [*extra, *overrides])  # type: ignore[arg-type]
    else:
        data: dict[str, Any]
        data = dict(recipe) if isinstance(recipe, dict) else {"passes": [_entry(p) for p in passes or ()]}
        data.update(settings or {})
        data.setdefault("name", "custom")
        loaded = Recipe.parse(yaml.safe_dump(data, sort_keys=False), overrides, "<python>")
    for index, given in enumerate(passes or ()):
        if isinstance(given, Pass) or (isinstance(given, type) and issubclass(given, Pass)):
            loaded.passes[index] = given if isinstance(given, Pass) else given()
    if exporter is not None:
        from .registry import find

        loaded.exporter = find("exporters", exporter)() if isinstance(exporter, str) else exporter  # type: ignore[assignment]
        loaded.recipe.export[0].use = loaded.exporter.name
    return loaded


def _entry(given: PassLike) -> Any:
    """How a pass is written in a recipe; classes are registered first, so that their name is known."""
    from .registry import register

    if isinstance(given, (str, dict)):
        return given
    cls = given if isinstance(given, type) else type(given)
    if not issubclass(cls, Pass):
        raise UsageError(f"{given!r} is not a pass", "optimize", "Give Pass instances, Pass classes or names")
    from .registry import entries

    known = entries("passes").get(cls.name)
    if known is None or known.cls is not cls:
        register(cls)
    if isinstance(given, Pass):
        return {cls.name: given.config.model_dump(mode="json")}
    return cls.name


def default_out(model: str, recipe: str) -> str:
    """`SmolLM2-135M-Instruct` and `int4-flash` → `SmolLM2-135M-Instruct-int4-flash`."""
    base = Path(model.rstrip("/")).name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", f"{base}-{recipe}")


def _with_saved(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    run: Callable[[Path], Artifact],
    scratch_folder: Callable[[Path], Any],
) -> Artifact:
    """Save a model in memory to a folder that lasts as long as the run, and run over that."""
    if tokenizer is None:
        raise UsageError("a model in memory needs its tokenizer", "optimize", "Pass tokenizer=…")
    with scratch_folder(folder) as scratch:
        saved = scratch / (getattr(model.config, "name_or_path", "") or model.config.model_type).replace("/", "--")
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        return run(saved)
