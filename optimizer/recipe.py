"""Recipe: the YAML file that says which passes run over a model, how the result is judged and what is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .base import Exporter, Options, Pass, Plugin
from .errors import UsageError, did_you_mean
from .registry import Kind, find
from .yaml_source import Location, YamlSource, apply_override, parse_yaml, read_yaml

CalibrationSource = Literal["text", "chat", "dataset", "self"]
DATA_FILES = (".jsonl", ".ndjson", ".parquet", ".csv", ".json", ".txt", ".arrow")
SIZES: dict[str, tuple[int, int]] = {"self": (32, 256)}
"""Sequences and tokens of each, by source, where the recipe does not say; 32 of 512 for all others."""


class CalibrationOptions(Options):
    """The tokens that calibrating passes see: of one source, without two documents in a sequence."""

    source: CalibrationSource | None = Field(
        None,
        description="`text`, `chat`, `dataset`, or `self`: what the model itself writes. None takes `chat` or "
        "`dataset` where one is named, else `text`. A recipe without this section, whose passes calibrate, takes "
        "`self`.",
    )
    text: str = Field("default", description="Text file, or `default`: the public-domain text that ships with llmopt.")
    chat: str | None = Field(None, description="JSONL file of conversations, rendered by the model's chat template.")
    dataset: str | None = Field(
        None, description="Hub id of a data set, or a local folder, Parquet, CSV or JSONL file; each row is a document."
    )
    dataset_config: str | None = Field(None, description="Configuration of the data set, where it has several.")
    dataset_revision: str | None = Field(None, description="Revision of a data set of the hub.")
    split: str = Field("train", description="Split of the data set.")
    column: str | None = Field(
        None, description="Column of texts or conversations; none takes `text`, `messages`, or the only one of texts."
    )
    num_samples: int | None = Field(
        None, ge=1, description="Token sequences (of short documents: more, with as many tokens); none is 32."
    )
    sequence_length: int | None = Field(None, ge=2, description="Tokens a sequence; none is 512, for `self` 256.")
    self_samples: int = Field(
        0,
        ge=0,
        description="Further sequences, which the model itself writes, going on from excerpts of these.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> CalibrationOptions:
        """Spell out source and sizes. Raises ValueError where two sources are named, or an option has no use."""
        named = [key for key in ("chat", "dataset") if getattr(self, key) is not None]
        if self.text != "default":
            named.append("text")
        if len(named) > 1 or (named and self.source not in (None, named[0])):
            others = [*named, *([f"source: {self.source}"] if self.source and self.source not in named else [])]
            raise ValueError(f"calibration has one source, and {' and '.join(others)} are named")
        self.source = self.source or (named[0] if named else "text")  # type: ignore[assignment]
        if self.source in ("chat", "dataset") and not named:
            raise ValueError(f"source: {self.source} needs `{self.source}`, the name of the data")
        if self.source != "dataset":
            useless = self.model_fields_set & {"dataset_config", "dataset_revision", "split", "column"}
            useless = {key for key in useless if getattr(self, key) not in (None, "train")}
            if useless:
                raise ValueError(f"`{min(useless)}` belongs to a dataset, not to source: {self.source}")
        if self.source == "self" and self.self_samples:
            raise ValueError("`self_samples` goes on from another source's text; with source: self say `num_samples`")
        samples, length = SIZES.get(self.source or "", (32, 512))
        self.num_samples, self.sequence_length = self.num_samples or samples, self.sequence_length or length
        return self


class EvaluateOptions(Options):
    """How source and artifact are measured."""

    text: str = Field("default", description="Text file, or `default`: a public-domain text, never the calibration's.")
    windows: int = Field(8, ge=1, description="Windows of the text that are scored.")
    window_length: int = Field(512, ge=2, description="Tokens a window; they do not overlap.")
    speed: bool = Field(True, description="Measure decode and prefill speed.")
    new_tokens: int = Field(32, ge=1, description="Tokens generated for the speed figure and the sample texts.")
    prompts: list[str] = Field(
        default=["The capital of France is", "Water boils when", "Once upon a time"],
        min_length=1,
        description="Prompts that the artifact must answer before it is accepted.",
    )


class Gates(Options):
    """Limits that the artifact must hold; a limit that is absent is not checked."""

    max_perplexity_increase: float | None = Field(
        None, ge=0, description="Relative rise of perplexity over the source: 0.08 or 8%."
    )
    max_mean_kl: float | None = Field(None, ge=0, description="Mean KL(source ‖ artifact) a token, in nats.")
    min_top1_agreement: float | None = Field(
        None, ge=0, le=1, description="Share of tokens at which both put the same token first."
    )
    min_compression: float | None = Field(None, gt=0, description="Bytes of the source's weights over the artifact's.")
    min_decode_speedup: float | None = Field(None, gt=0, description="Decode tokens/s of the artifact over the source.")

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _percent(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("a limit is a number, not true or false")
        if isinstance(value, str) and value.strip().endswith("%"):
            try:
                return float(value.strip()[:-1]) / 100
            except ValueError:
                raise ValueError(f"{value!r} is not a percentage") from None
        return value


class Step(BaseModel):
    """One pass or exporter of a recipe: its name and its options as written."""

    use: str
    options: dict[str, Any] = Field(default_factory=dict)


class Recipe(Options):
    """A whole recipe. `Recipe.load` reads, overrides and validates it."""

    version: Literal[1] = Field(1, description="Version of the recipe format.")
    name: str = Field("", description="Name of the recipe; the file's name where absent.")
    description: str = Field("", description="What the recipe is for.")
    model: str | None = Field(None, description="Source model, where the command line names none.")
    revision: str | None = Field(None, description="Revision of a hub model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Element type in which the source is loaded; `auto` is the one it is stored in."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of every random number of the run.")
    max_memory: int | None = Field(
        None,
        ge=0,
        description="Memory that the run may take, such as 8GB; none: what the machine has. Decides whether weights "
        "stay in their files and whether activations go to disk; what does not fit is refused before the long run.",
    )
    calibration: CalibrationOptions = Field(default_factory=CalibrationOptions)  # type: ignore[arg-type]
    passes: list[Step] = Field(default_factory=list, description="Passes in the order in which they run.")
    export: list[Step] = Field(
        default_factory=lambda: [Step(use="huggingface")], description="The exporter that writes the artifact."
    )
    evaluate: EvaluateOptions = Field(default_factory=EvaluateOptions)  # type: ignore[arg-type]
    gates: Gates = Field(default_factory=Gates)  # type: ignore[arg-type]

    @field_validator("max_memory", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        from ..runtime.memory import parse_size

        return parse_size(value) if isinstance(value, str) else value

    @classmethod
    def load(cls, recipe: str | Path, overrides: Iterable[str] = ()) -> LoadedRecipe:
        """Read a recipe by path or by shipped name, apply `--set` overrides, validate all of it.

        Raises UsageError (file, line, key, nearest valid name) on anything that is not right.
        """
        return build(_open(recipe), overrides)

    @classmethod
    def parse(cls, text: str, overrides: Iterable[str] = (), name: str = "<recipe>") -> LoadedRecipe:
        """The same from a string."""
        return build(parse_yaml(text, name), overrides)


class LoadedRecipe:
    """A validated recipe with its passes and exporter instantiated, and where each key stands."""

    def __init__(self, recipe: Recipe, passes: list[Pass], exporter: Exporter, source: YamlSource) -> None:
        self.recipe, self.passes, self.exporter, self.source = recipe, passes, exporter, source

    def where(self, *location: Any) -> str:
        """Where a key stands, for an error."""
        return self.source.where(location)

    def pass_where(self, index: int, *rest: Any) -> str:
        """Where an option of pass number `index` stands."""
        return self.where("passes", index, self.recipe.passes[index].use, *rest)

    def as_run(self) -> dict[str, Any]:
        """The recipe with every option spelled out, as the manifest keeps it."""
        out = self.recipe.model_dump(mode="json", exclude={"passes", "export"})
        out["passes"] = [
            {step.use: p.config.model_dump(mode="json")} for step, p in zip(self.recipe.passes, self.passes)
        ]
        out["export"] = [{self.recipe.export[0].use: self.exporter.config.model_dump(mode="json")}]
        return out


def shipped() -> dict[str, Path]:
    """Name → path of the recipes that ship with llmopt."""
    folder = Path(str(files("llmopt.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _open(recipe: str | Path) -> YamlSource:
    path = Path(recipe)
    if path.is_file():
        return read_yaml(path)
    name = path.name.removesuffix(".yaml").removesuffix(".yml")
    if path.parent == Path(".") and name in shipped():
        source = read_yaml(shipped()[name])
        source.name = f"{name}.yaml"
        return source
    if path.is_dir():
        raise UsageError("is a folder, not a recipe", str(recipe), "Give a YAML file")
    if path.parent == Path("."):
        hint = did_you_mean(name, shipped())
        raise UsageError(f"no file and no shipped recipe has the name {str(recipe)!r}", "", hint)
    raise UsageError("no such recipe file", str(recipe))


def build(source: YamlSource, overrides: Iterable[str] = ()) -> LoadedRecipe:
    """Validate parsed YAML and instantiate its plugins."""
    if source.data is None:
        raise UsageError("the recipe is empty", source.name, "It needs at least a `passes:` list")
    if not isinstance(source.data, dict):
        raise UsageError("a recipe is a mapping of keys", source.where(()), "Start with `passes:`")
    for assignment in overrides:
        apply_override(source, assignment)
    data = dict(source.data)
    for key in ("passes", "export"):
        if key in data:
            data[key] = _steps(data[key], key, source)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise _usage_error(error, Recipe, source, ()) from None
    if not recipe.passes:
        raise UsageError("the recipe has no passes", source.where(("passes",)), "List at least one under `passes:`")
    if len(recipe.export) != 1:
        raise UsageError("exactly one exporter is supported", source.where(("export",)))
    recipe.name = recipe.name or Path(source.name).stem
    passes = [_plugin("passes", step, source, ("passes", i, step.use)) for i, step in enumerate(recipe.passes)]
    exporter = _plugin("exporters", recipe.export[0], source, ("export", 0, recipe.export[0].use))
    if "calibration" not in data and any(item.calibrates() for item in passes if isinstance(item, Pass)):
        recipe.calibration = CalibrationOptions(source="self")  # type: ignore[call-arg]
    _resolve_texts(recipe, source)
    return LoadedRecipe(recipe, passes, exporter, source)  # type: ignore[arg-type]


def _steps(value: Any, key: str, source: YamlSource) -> list[Step]:
    if not isinstance(value, list):
        raise UsageError("expected a list", source.where((key,)), f"Write `{key}:` and then `- NAME: {{options}}`")
    steps = []
    for i, item in enumerate(value):
        where = source.where((key, i))
        if isinstance(item, str):
            steps.append(Step(use=item))
        elif isinstance(item, dict) and len(item) == 1 and isinstance(next(iter(item)), str):
            name, options = next(iter(item.items()))
            if options is not None and not isinstance(options, dict):
                raise UsageError(f"the options of {name!r} must be a mapping", where, f"Write `- {name}: {{…}}`")
            for option in options or {}:
                if not isinstance(option, str):
                    raise UsageError(f"option {option!r} of {name!r} is not a name", where)
            steps.append(Step(use=name, options=options or {}))
        else:
            what = "an entry is a name, or one name with its options"
            raise UsageError(what, where, "Write `- NAME: {option: value}`")
    return steps


def _plugin(kind: Kind, step: Step, source: YamlSource, location: Location) -> Plugin:
    cls = find(kind, step.use, source.where(location))
    try:
        config = cls.Config.model_validate(step.options)
    except ValidationError as error:
        raise _usage_error(error, cls.Config, source, location) from None
    return cls(config)


def _usage_error(error: ValidationError, model: type[BaseModel], source: YamlSource, base: Location) -> UsageError:
    first = error.errors()[0]
    location = (*base, *first["loc"])
    where = source.where(location)
    if first["type"] == "extra_forbidden":
        owner = _model_at(model, first["loc"][:-1])
        hint = did_you_mean(str(first["loc"][-1]), owner.model_fields) if owner else ""
        return UsageError(f"unknown key {first['loc'][-1]!r}", where, hint)
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    shown = f" (given: {given!r})" if isinstance(given, (str, int, float, bool)) and repr(given) not in message else ""
    return UsageError(f"{message[:1].lower()}{message[1:]}{shown}", where)


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The section whose keys stand at `location`, also inside mappings, lists and sections that may be absent."""
    annotation: Any = model
    for part in location:
        section = _section(annotation)
        if section is None:
            annotation = (get_args(annotation) or (None,))[-1]
        else:
            field = section.model_fields.get(str(part))
            annotation = field.annotation if field else None
    return _section(annotation)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation names, alone or as `Section | None`."""
    union = get_origin(annotation) in (Union, UnionType)
    named = get_args(annotation) if union else (annotation,)
    return next((one for one in named if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _find(name: str, what: str, source: YamlSource, location: Location) -> str:
    """The path of a file that stands beside the recipe or in the working directory. Raises UsageError."""
    found = next((path for path in (Path(source.name).parent / name, Path(name)) if path.is_file()), None)
    if found is None:
        raise UsageError(f"no such {what}: {name}", source.where(location))
    return str(found)


def _resolve_texts(recipe: Recipe, source: YamlSource) -> None:
    """Make the text paths real: relative to the recipe's folder, else to the working directory."""
    parts: list[tuple[str, Any]] = [("calibration", recipe.calibration), ("evaluate", recipe.evaluate)]
    for key, part in parts:
        if part.text != "default":
            part.text = _find(part.text, "text file", source, (key, "text"))
    options = recipe.calibration
    if options.chat is not None:
        options.chat = _find(options.chat, "file of chats", source, ("calibration", "chat"))
    if options.dataset is not None:
        beside = Path(source.name).parent / options.dataset
        if beside.exists():
            options.dataset = str(beside)
        elif Path(options.dataset).suffix in DATA_FILES and not Path(options.dataset).exists():
            raise UsageError(f"no such data set: {options.dataset}", source.where(("calibration", "dataset")))
    if recipe.evaluate.text != "default" and recipe.calibration.text != "default":
        hashes = {hashlib.sha256(Path(p.text).read_bytes()).hexdigest() for _, p in parts}
        if len(hashes) == 1:
            raise UsageError(
                "calibration and evaluation use the same text, so the figures would flatter the result",
                source.where(("evaluate", "text")),
                "Name another text",
            )
