"""`llmopt bench`: names resolved to targets, the run, and the JSON document that a report draws."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .. import __version__
from ..evaluation.bench import session
from ..evaluation.bench.loads import MODES, LoadSettings, cases_of
from ..evaluation.bench.run import Target
from .errors import UsageError
from .events import Listener, silent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TargetName:
    """What a user wrote for a target: a place, and options after commas (`my-int4,activation=int8,label=fast`)."""

    place: str
    label: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_url(self) -> bool:
        return self.place.startswith(("http://", "https://"))

    @classmethod
    def parse(cls, text: str) -> TargetName:
        """Raises UsageError. Values are YAML; `draft=ngram` stands for `draft={kind: ngram}`, `draft=none` for none."""
        if Path(text).exists():
            return cls(text, Path(text).resolve().name)
        place, *pairs = text.split(",")
        options: dict[str, Any] = {}
        for pair in pairs:
            name, equals, given = pair.partition("=")
            if not equals or not name:
                raise UsageError(f"{pair!r} is no option of the form NAME=VALUE", text)
            options[name.strip()] = yaml.safe_load(given)
        label = str(options.pop("label", "")) or ",".join(
            [Path(place.rstrip("/")).name if "://" not in place else place, *pairs]
        )
        found = cls(place, label, options)
        if found.is_url and options:
            raise UsageError(f"a server takes no option {next(iter(options))!r}", text, "Start it with what you want.")
        if isinstance(draft := options.get("draft"), str):
            options["draft"] = False if draft == "none" else {"kind": draft}
        return found


def target_names(texts: Sequence[str]) -> list[TargetName]:
    """Every target with a label of its own. Raises UsageError."""
    names = [TargetName.parse(text) for text in texts]
    found: list[TargetName] = []
    for name in names:
        same = sum(other.label == name.label or other.label.startswith(f"{name.label} (") for other in found)
        found.append(TargetName(name.place, f"{name.label} ({same + 1})" if same else name.label, name.options))
    return found


@dataclass(frozen=True)
class BenchSettings:
    """How targets are opened and measured."""

    rounds: int = 3
    warmup: int = 2
    engine: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    trust_remote_code: bool = False
    temperature: float = 0.0
    ignore_eos: bool = True
    endpoint: str = "completions"
    model: str | None = None
    tokenizer: str | None = None
    timeout: float = 600.0
    keep: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "ignore_eos": self.ignore_eos, "keep": self.keep}


def bench(
    mode: str,
    targets: Sequence[str],
    load: LoadSettings | None = None,
    settings: BenchSettings | None = None,
    listener: Listener = silent,
) -> dict[str, Any]:
    """Measure models, artifacts and servers side by side; docs/bench.md describes the JSON object that is returned.

    mode: latency, throughput, serve or sweep. targets: folders, hub ids, short names, each perhaps with options of
    `llmopt.load` (`my-int4,activation=int8`), or URLs of servers. Raises UsageError where the request is wrong,
    RunError where a model does not open or a server does not answer.
    """
    load, settings = load or LoadSettings(), settings or BenchSettings()
    if mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}", "bench", f"Use one of {', '.join(MODES)}.")
    if not targets:
        raise UsageError("no target is named", f"bench {mode}", "Name a model, an artifact or a server's URL.")
    names = target_names(targets)
    folders = {name.label: _folder(name.place) for name in names if not name.is_url}
    tokenizer = _tokenizer(names, folders, load, settings)
    prompts = None
    if load.prompts is None or mode == "sweep":
        from ..evaluation.bench.prompts import RandomPrompts

        if tokenizer is None:
            raise UsageError(
                "random prompts need a tokenizer", f"bench {mode}", "Name one by --tokenizer, or a file by --prompts."
            )
        prompts = RandomPrompts(tokenizer, load.seed)
    cases = cases_of(mode, load, prompts)
    with ExitStack() as stack:
        opened = []
        for name in names:
            target = _open(name, folders.get(name.label), tokenizer, settings)
            stack.callback(target.close)
            opened.append(target)
        check_room(mode, load, opened)
        found = session.measure(
            opened,
            cases,
            rounds=settings.rounds,
            warmup=settings.warmup,
            objectives=load.objectives,
            listener=listener,
        )
        about = [{"name": target.name, **target.about()} for target in opened]
    notes = session.warnings(found) + _reuse(load, settings, found)
    return document(
        mode,
        {**load.as_dict(), **{k: v for k, v in settings.__dict__.items() if k != "keep"}},
        {"targets": about, "cases": session.plain(found), "warnings": notes},
    )


def check_room(mode: str, load: LoadSettings, targets: Sequence[Target]) -> None:
    """Raise UsageError where the longest random prompt with its answer does not fit a model's context."""
    if load.prompts is not None:
        return
    prompt = max(load.contexts) if mode == "sweep" else load.prefix_len + load.input_len.high
    for target in targets:
        limit = target.about().get("context_length")
        if limit is not None and prompt + load.output_len.high > limit:
            raise UsageError(
                f"{prompt:,} prompt and {load.output_len.high:,} new tokens do not fit the context of {limit:,}",
                target.name,
                "Ask for less.",
            )


def document(mode: str, settings: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """The document's head, the same for every mode, and its content."""
    from ..evaluation.bench.machine import about_machine
    from ..evaluation.proof import environment

    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "mode": mode,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "llmopt_version": __version__,
        "settings": settings,
        "environment": {**environment(), **about_machine()},
        **content,
    }


def _folder(place: str) -> Path:
    from .sources import runnable

    return runnable(place)


def _tokenizer(
    names: Sequence[TargetName], folders: dict[str, Path], load: LoadSettings, settings: BenchSettings
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that makes prompts and counts what servers do not: the one named, else that of the first folder."""
    from ..runtime.tokenizer_files import open_tokenizer

    if settings.tokenizer is None and load.prompts is not None and all(not name.is_url for name in names):
        return None
    place = Path(_folder(settings.tokenizer)) if settings.tokenizer else next(iter(folders.values()), None)
    return None if place is None else open_tokenizer(place, settings.trust_remote_code)


def _open(
    name: TargetName, folder: Path | None, tokenizer: PreTrainedTokenizerBase | None, settings: BenchSettings
) -> Target:
    if folder is None:
        from ..evaluation.bench.server import Server

        count = None if tokenizer is None else lambda text: len(tokenizer.encode(text, add_special_tokens=False))
        server = Server(
            name.place,
            name=name.label,
            endpoint=settings.endpoint,
            model=settings.model,
            count=count,
            timeout=settings.timeout,
            **settings.sampling,
        )
        server.open()
        return server
    from ..evaluation.bench.artifact_process import ArtifactProcess

    options = {"engine": settings.engine, "device": settings.device, "dtype": settings.dtype, **name.options}
    if settings.trust_remote_code:
        options["trust_remote_code"] = True
    if settings.num_threads is not None:
        options.setdefault("num_threads", settings.num_threads)
    return ArtifactProcess(folder, name=name.label, options=options, **settings.sampling)


def _reuse(load: LoadSettings, settings: BenchSettings, cases: Sequence[dict[str, Any]]) -> list[str]:
    """A warning where later rounds repeat prompts that a prefix cache may still hold."""
    if load.prompts is None or settings.rounds < 2:
        return []
    from ..evaluation.bench.prompts import read_requests

    listed = len(read_requests(load.prompts, load.output_len, load.seed))
    if (load.num_prompts or listed) * settings.rounds <= listed:
        return []
    return [
        "rounds repeat the file's prompts, so a prefix cache may answer: use --num-prompts, or prefix_caching=false"
    ]
