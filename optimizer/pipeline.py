"""The pipeline: source → reference figures → passes → export → proof in a fresh process → gates → artifact."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..evaluation.memory import weight_bytes
from ..evaluation.perplexity import Perplexity
from ..evaluation.reference import write_reference
from ..evaluation.texts import check_vocabulary, token_windows
from ..runtime.chat import context_length
from .artifact import Artifact
from .base import Context, Pass, PassReport
from .calibration import Calibration, Source, read_text
from .calibration_sources import make_source
from .chain import check_chain
from .environment import environment, library_version
from .errors import GateError, LlmoptError, RunError, UsageError
from .events import Event, Listener, silent
from .files import fsync_tree, replace_folder, require_space, scratch_folder, temporary_sibling
from .gates import describe as describe_gate
from .gates import judge
from .manifest import GateRecord, Manifest, Note, PassRecord, SourceRecord, hash_files
from .measure import prove_and_compare, source_figures
from .model import LoadedModel, SourceIdentity
from .planning import Plan, make_plan
from .recipe import EvaluateOptions, LoadedRecipe
from .registry import code_hash
from .runtime_spec import RuntimeSpec
from .source_model import load_source
from .sources import describe
from .workspace import CachedPass, Workspace, fingerprint, pass_keys


@dataclass
class Settings:
    """Where a run writes, what it may reuse, and who listens."""

    out: Path
    force: bool = False
    keep_failed: bool = False
    trust_remote_code: bool = False
    cache: bool = True
    cache_folder: Path = field(default_factory=Path)
    cache_limit: int = 20 * 2**30
    listener: Listener = silent


class Run:
    """One run of a recipe over a source. `execute` does all of it and returns the artifact."""

    def __init__(self, loaded: LoadedRecipe, source: SourceIdentity, settings: Settings) -> None:
        self.loaded, self.recipe, self.source, self.settings = loaded, loaded.recipe, source, settings
        self.workspace = Workspace(settings.cache_folder, settings.cache_limit, settings.cache)
        self.records: list[PassRecord] = []
        self.notes: list[dict[str, str]] = []
        self.calibrated = False

    def execute(self) -> Artifact:
        """Raises UsageError before anything is loaded where the request is wrong, RunError where the run fails,
        GateError where the result misses a gate. Whatever happens, no half artifact is left.
        """
        self._emit("run_started", data={"model": self.source.id, "recipe": self.recipe.name})
        try:
            artifact = self._execute()
        except LlmoptError as error:
            self._emit("run_failed", message=str(error))
            raise
        except OSError as error:
            self._emit("run_failed", message=str(error))
            where = str(error.filename or self.settings.out)
            raise RunError(f"the system refused: {error.strerror or error}", where) from error
        self._emit("run_finished", message=str(artifact.path), data=artifact.manifest.measured)
        return artifact

    def _execute(self) -> Artifact:
        check_chain(self.loaded)
        self._check_out()
        self.info = describe(self.source, self.settings.trust_remote_code)
        plan = make_plan(self.loaded, self.info)
        plan.raise_refusals()
        require_space(self.settings.out.parent, plan.bytes_after + 32 * 2**20, "The artifact")
        with scratch_folder(self.settings.cache_folder) as workdir:
            self.workdir = workdir
            with self._stage("load", total_bytes=self.info.weight_bytes):
                model = self._load()
            with self._stage("reference"):
                before, reference = self._reference(model)
            model = self._run_passes(model)
            return self._finish(model, plan, before, reference)

    def _check_out(self) -> None:
        out = self.settings.out
        if out.exists() and not self.settings.force:
            raise UsageError("exists already", str(out), "Choose another --out, or pass --force to replace it")
        if out.exists() and not (out.is_dir() and ((out / "llmopt.json").exists() or not any(out.iterdir()))):
            raise UsageError("is not an llmopt artifact, so it is not replaced", str(out), "Choose another --out")
        if out.resolve() == self.source.folder.resolve():
            raise UsageError("is the source model itself", str(out), "Choose another --out")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary_sibling(out).rmdir()
        except OSError as error:
            raise UsageError(f"cannot be written: {error.strerror}", str(out), "Choose another --out") from None

    def _load(self) -> LoadedModel:
        return load_source(self.source, self.recipe.dtype, self.settings.trust_remote_code)

    def _reference(self, model: LoadedModel) -> tuple[dict[str, Any], Path]:
        options = self.recipe.evaluate
        text = read_text(options.text, "evaluation")
        windows = token_windows(text, model.tokenizer, options.window_length, options.windows, where=options.text)
        vocabulary = model.config.get_text_config().vocab_size
        check_vocabulary(windows, vocabulary, options.text)
        self._check_context(model, options)
        path = self.workdir / "reference.safetensors"
        require_space(path, windows.numel() * vocabulary * self.info.dtype_bytes, "Keeping the source's logits")
        perplexity = write_reference(model.module, model.tokenizer, windows, path)
        _require_sense(perplexity, vocabulary, self.source)
        return source_figures(self.info, weight_bytes(model.module), perplexity), path

    def _check_context(self, model: LoadedModel, options: EvaluateOptions) -> None:
        """Raise UsageError where the evaluation asks for more tokens than the model's context holds."""
        limit = context_length(model.config)
        lengths = [len(model.tokenizer(prompt)["input_ids"]) for prompt in options.prompts]
        longest = max(lengths) + options.new_tokens
        for key, tokens in (("window_length", options.window_length), ("prompts", longest)):
            if limit is not None and tokens > limit:
                what = f"{tokens} tokens do not fit the model's context of {limit}"
                raise UsageError(what, self.loaded.where("evaluate", key), "Ask for fewer")

    def _context(self, model: LoadedModel, stage: str) -> Context:
        options = self.recipe.calibration
        samples, length = options.num_samples or 1, options.sequence_length or 2
        calibration = Calibration(model.tokenizer, self.calibration_source, samples, length)
        seed = self.recipe.seed
        return Context(self.info, calibration, seed, self.workdir, stage, self.settings.listener, self.notes)

    @cached_property
    def calibration_source(self) -> Source:
        """Where calibration tokens come from; nothing is read before a pass asks for them."""
        cache = self.settings.cache_folder if self.settings.cache else None
        trust = self.settings.trust_remote_code
        return make_source(self.recipe.calibration, self.source, self.recipe.seed, cache, trust)

    def _run_passes(self, model: LoadedModel) -> LoadedModel:
        passes = self.loaded.passes
        keys = pass_keys(passes, self._key_base())
        done: list[tuple[Pass, PassReport]] = []
        first, cached = self._longest_cached(keys)
        if cached is not None:
            known = [self.workspace.lookup(key) for key in keys[: first + 1]]
            done = [(item, entry.report) for item, entry in zip(passes, known) if entry is not None]
            try:
                self.workspace.load(cached, model, done)
            except RunError as error:
                self._context(model, passes[first].name).note("note", f"{error}; the passes run again")
                model, done, cached = self._load(), [], None
            else:
                for item, entry in zip(passes, known):
                    assert entry is not None
                    self._record(item, entry, cached=True)
        weights_key = cached.weights_key if cached else None
        for index in range(len(done), len(passes)):
            weights_key = self._run_pass(model, passes[index], keys[index], weights_key)
        return model

    def _longest_cached(self, keys: list[str]) -> tuple[int, CachedPass | None]:
        """The last pass up to which every result is known, and its entry."""
        last: tuple[int, CachedPass | None] = (-1, None)
        for index, key in enumerate(keys):
            cached = self.workspace.lookup(key)
            if cached is None:
                break
            last = (index, cached)
        return last

    def _run_pass(self, model: LoadedModel, item: Pass, key: str, weights_key: str | None) -> str | None:
        import torch

        context = self._context(model, item.name)
        before, noted, start = fingerprint(model), len(self.notes), time.perf_counter()
        torch.manual_seed(self.recipe.seed)
        with self._stage(item.name):
            report = item.run(model, context)
            changed = item.changes_weights or fingerprint(model) != before
            seconds = time.perf_counter() - start
            runtime = model.runtime.model_copy(deep=True)
            used = context.calibration.used
            entry = CachedPass(report, runtime, self.notes[noted:], seconds, weights_key, used)
            self.workspace.store(key, entry, model, context, changed_weights=changed)
        self._record(item, entry, cached=False)
        return key if changed else weights_key

    def _record(self, item: Pass, entry: CachedPass, cached: bool) -> None:
        if cached:
            self.notes.extend(entry.notes)
            self._emit("stage_finished", item.name, "from the cache", data={"cached": True})
        config = item.config.model_dump(mode="json")
        code, report = code_hash(type(item)), asdict(entry.report)
        record = PassRecord(
            name=item.name, config=config, code_sha256=code, seconds=round(entry.seconds, 3), cached=cached, **report
        )
        self.records.append(record)
        self.calibrated |= entry.calibrated

    def _key_base(self) -> dict[str, Any]:
        options = self.recipe.calibration
        calibration = [self.calibration_source.identity(), options.num_samples, options.sequence_length]
        return {
            "source": self.source.sha256,
            "dtype": self.recipe.dtype,
            "seed": self.recipe.seed,
            "calibration": calibration,
            **{name: library_version(name) for name in ("llmopt", "torch", "transformers")},
        }

    def _finish(self, model: LoadedModel, plan: Plan, before: dict[str, Any], reference: Path) -> Artifact:
        out = self.settings.out
        temporary = temporary_sibling(out)
        try:
            return self._write(model, temporary, before, reference)
        except LlmoptError as error:
            error.where = error.where.replace(str(temporary), str(out))
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _write(self, model: LoadedModel, temporary: Path, before: dict[str, Any], reference: Path) -> Artifact:
        """Export into `temporary`, prove it there, and put it in its place."""
        out = self.settings.out
        exporter = self.loaded.exporter
        with self._stage(exporter.name):
            details = exporter.export(model, temporary, self._context(model, exporter.name))
        runtime = model.runtime.model_copy(deep=True)
        calibration = self._context(model, "").calibration
        manifest = self._manifest(temporary, details, runtime, calibration)
        manifest.write(temporary)
        del model
        with self._stage("prove"):
            manifest.measured, manifest.certificate = prove_and_compare(
                before, self.info, temporary, reference, self.recipe
            )
        manifest.gates = judge(self.recipe.gates, manifest.measured)
        manifest.notes = [Note(**note) for note in self.notes]
        manifest.write(temporary)
        failed = [gate for gate in manifest.gates if not gate.passed]
        if failed and not self.settings.keep_failed:
            self._gate_error(failed, temporary, kept=None)
        fsync_tree(temporary)
        replace_folder(temporary, out, force=self.settings.force)
        if failed:
            self._gate_error(failed, out, kept=out)
        return Artifact(out, manifest)

    def _manifest(
        self, folder: Path, details: dict[str, Any], runtime: RuntimeSpec, calibration: Calibration
    ) -> Manifest:
        return Manifest(
            llmopt_version=library_version("llmopt") or "unknown",
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            source=SourceRecord(**self.source.as_dict()),
            seed=self.recipe.seed,
            recipe=self.loaded.as_run(),
            calibration=calibration.describe() if self.calibrated else None,
            passes=self.records,
            exporter=details,
            runtime=runtime,
            measured={},
            certificate={},
            environment=environment(),
            files=hash_files(folder),
        )

    def _gate_error(self, failed: list[GateRecord], folder: Path, kept: Path | None) -> None:
        from ..evaluation.attribution import attribute

        with self._stage("attribution"):
            shares = attribute(self.source.folder, folder, read_text(self.recipe.evaluate.text, "evaluation"))
        raise GateError("; ".join(describe_gate(gate) for gate in failed), shares=shares, kept=kept)

    def _emit(self, kind: Any, stage: str = "", message: str = "", data: dict[str, Any] | None = None) -> None:
        self.settings.listener(Event(kind, stage, message, data=data or {}))

    @contextmanager
    def _stage(self, name: str, **data: Any) -> Iterator[None]:
        start = time.perf_counter()
        self._emit("stage_started", name, data=data)
        yield
        self._emit("stage_finished", name, data={"seconds": round(time.perf_counter() - start, 3)})


def _require_sense(perplexity: Perplexity, vocabulary: int, source: SourceIdentity) -> None:
    """Raise RunError where the source does far worse than guessing: a wrong tokenizer, or damaged weights."""
    if perplexity.perplexity > 4 * vocabulary:
        raise RunError(
            f"its perplexity is {perplexity.perplexity:.3g}, far worse than guessing among {vocabulary} tokens",
            source.id,
            "Its tokenizer belongs to another model, or its weights are damaged",
        )
