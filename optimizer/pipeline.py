"""The pipeline: source → reference figures → passes → export → proof in a fresh process → gates → artifact."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..evaluation.memory import weight_bytes
from ..evaluation.perplexity import Perplexity
from ..evaluation.proof_streamed import too_large
from ..evaluation.reference import write_reference
from ..evaluation.report import write_report
from ..evaluation.streamed import streamed_logits
from ..evaluation.texts import check_vocabulary, token_windows
from ..runtime.artifact import REPORT
from ..runtime.chat import context_length
from ..runtime.memory import available_memory, give_back
from .artifact import Artifact
from .base import Context
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
from .memory_timeline import MemoryTimeline
from .model import LoadedModel, ModelInfo, SourceIdentity
from .pass_runner import PassRunner, materialize
from .planning import Plan, make_plan
from .recipe import EvaluateOptions, LoadedRecipe
from .runtime_spec import RuntimeSpec
from .self_text import Continuations
from .source_model import load_source, open_source
from .sources import describe
from .workspace import Workspace


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
    report: bool = True


class Run:
    """One run of a recipe over a source. `execute` does all of it and returns the artifact."""

    def __init__(self, loaded: LoadedRecipe, source: SourceIdentity, settings: Settings) -> None:
        self.loaded, self.recipe, self.source, self.settings = loaded, loaded.recipe, source, settings
        self.workspace = Workspace(settings.cache_folder, settings.cache_limit, settings.cache)
        self.records: list[PassRecord] = []
        self.notes: list[dict[str, str]] = []
        self.calibrated = False
        self.memory = MemoryTimeline()

    def execute(self) -> Artifact:
        """Raises UsageError before anything is loaded where the request is wrong, RunError where the run fails,
        GateError where the result misses a gate. Whatever happens, no half artifact is left.
        """
        self._emit("run_started", data={"model": self.source.id, "recipe": self.recipe.name})
        try:
            with self.memory:
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
        self.info = self._describe()
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

    def _describe(self) -> ModelInfo:
        return describe(self.source, self.settings.trust_remote_code)

    def _load(self) -> LoadedModel:
        """The source: lazy where every stage can stream, or where memory does not hold it comfortably."""
        arguments = (self.source, self.recipe.dtype, self.settings.trust_remote_code)
        stages = [*self.loaded.passes, self.loaded.exporter]
        if all(stage.streams for stage in stages) or self._is_large():
            opened = open_source(*arguments)
            if isinstance(opened, LoadedModel):
                return opened
            self._note("load", f"the source is loaded whole: {opened}")
        return load_source(*arguments)

    def _is_large(self) -> bool:
        allowed = self.recipe.max_memory or available_memory()
        return self.info.weight_bytes > allowed / 2

    def _note(self, stage: str, message: str) -> None:
        self.notes.append({"stage": stage, "kind": "note", "message": message})
        self._emit("note", stage, message, data={"note": "note"})

    def _reference(self, model: LoadedModel) -> tuple[dict[str, Any], Path]:
        options = self.recipe.evaluate
        text = read_text(options.text, "evaluation")
        windows = token_windows(text, model.tokenizer, options.window_length, options.windows, where=options.text)
        vocabulary = model.config.get_text_config().vocab_size
        check_vocabulary(windows, vocabulary, options.text)
        self._check_context(model, options)
        path = self.workdir / "reference.safetensors"
        require_space(path, windows.numel() * vocabulary * self.info.dtype_bytes, "Keeping the source's logits")
        scored = streamed_logits(model, windows) if model.weights is not None else None
        perplexity = write_reference(model.module, model.tokenizer, windows, path, scored=scored)
        _require_sense(perplexity, vocabulary, self.source)
        in_files = model.weights.nbytes if model.weights is not None else 0
        return source_figures(self.info, weight_bytes(model.module) + in_files, perplexity), path

    def _check_context(self, model: LoadedModel, options: EvaluateOptions) -> None:
        """Raise UsageError where evaluation or calibration ask for more tokens than the model's context holds."""
        limit = context_length(model.config)
        lengths = [len(model.tokenizer(prompt)["input_ids"]) for prompt in options.prompts]
        longest = max(lengths) + options.new_tokens
        asked = [("evaluate", "window_length", options.window_length), ("evaluate", "prompts", longest)]
        calibration = self.recipe.calibration
        if calibration.source != "self" and any(item.calibrates() for item in self.loaded.passes):
            asked.append(("calibration", "sequence_length", calibration.sequence_length or 0))
        for section, key, tokens in asked:
            if limit is not None and tokens > limit:
                what = f"{tokens} tokens do not fit the model's context of {limit}"
                raise UsageError(what, self.loaded.where(section, key), "Ask for fewer")

    def _context(self, model: LoadedModel, stage: str) -> Context:
        options = self.recipe.calibration
        samples, length = options.num_samples or 1, options.sequence_length or 2
        calibration = Calibration(model.tokenizer, self.calibration_source, samples, length, self._continuations)
        context = Context(self.info, calibration, self.recipe.seed, self.workdir, stage, self.settings.listener)
        context.notes, context.max_memory = self.notes, self.recipe.max_memory
        return context

    @cached_property
    def calibration_source(self) -> Source:
        """Where calibration tokens come from; nothing is read before a pass asks for them."""
        return make_source(self.recipe.calibration, self.source, self.recipe.seed, **self._writing)

    @cached_property
    def _continuations(self) -> Continuations | None:
        """What the model adds to the calibration source."""
        samples = self.recipe.calibration.self_samples
        if not samples:
            return None
        return Continuations(self.source, seed=self.recipe.seed, num_samples=samples, **self._writing)

    @property
    def _writing(self) -> dict[str, Any]:
        """Options of what the model writes itself."""
        cache = self.settings.cache_folder if self.settings.cache else None

        def progress(done: int, total: int, left: float) -> None:
            said = "the model writes calibration text"
            self.settings.listener(Event("progress", "calibration", said, done, total, {"left": left}))

        return {"cache": cache, "trust_remote_code": self.settings.trust_remote_code, "progress": progress}

    def _run_passes(self, model: LoadedModel) -> LoadedModel:
        def cached(name: str) -> None:
            self._emit("stage_finished", name, "from the cache", data={"cached": True})

        runner = PassRunner(self.loaded.passes, self.workspace, self._load, self._context, self._stage, cached)
        model = runner.run(model, self._key_base())
        self.records, self.calibrated = runner.records, runner.calibrated
        return model

    def _key_base(self) -> dict[str, Any]:
        options = self.recipe.calibration
        calibration = [self.calibration_source.identity(), options.num_samples, options.sequence_length]
        if self._continuations is not None:
            calibration.append(self._continuations.identity())
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
            context = self._context(model, exporter.name)
            if model.weights is not None and not exporter.streams:
                materialize(model, context)
            details = exporter.export(model, temporary, context)
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
        failed = [gate for gate in manifest.gates if not gate.passed]
        if failed and not self.settings.keep_failed:
            self._gate_error(failed, temporary, kept=None)
        manifest.timeline = self.memory.result()
        manifest.notes = [Note(**note) for note in self.notes]
        if self.settings.report:
            self._draw(manifest, temporary)
        manifest.write(temporary)
        fsync_tree(temporary)
        replace_folder(temporary, out, force=self.settings.force)
        if failed:
            self._gate_error(failed, out, kept=out)
        return Artifact(out, manifest)

    def _draw(self, manifest: Manifest, folder: Path) -> None:
        """Write the artifact's report; where that cannot be, a note says why: the artifact is none the worse."""
        with self._stage("report"):
            try:
                write_report("artifact", manifest.model_dump(mode="json"), folder / REPORT)
            except Exception as error:
                self._note("report", f"no report was written: {error}")
                manifest.notes.append(Note(**self.notes[-1]))  # type: ignore[arg-type]

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

        if too_large(self.source.folder, self.recipe.max_memory):
            raise GateError("; ".join(describe_gate(gate) for gate in failed), shares=self._own_errors(), kept=kept)
        with self._stage("attribution"):
            shares = attribute(self.source.folder, folder, read_text(self.recipe.evaluate.text, "evaluation"))
        raise GateError("; ".join(describe_gate(gate) for gate in failed), shares=shares, kept=kept)

    def _own_errors(self) -> list[tuple[str, float]]:
        """Layers by their own relative error, as shares of the sum, worst first: stands in for measured shares where
        the two models do not fit into memory."""
        errors = {line["name"]: line["error"] for record in self.records for line in record.layers if "error" in line}
        total = sum(errors.values()) or 1.0
        return sorted(((name, error / total) for name, error in errors.items()), key=lambda item: -item[1])

    def _emit(self, kind: Any, stage: str = "", message: str = "", data: dict[str, Any] | None = None) -> None:
        self.settings.listener(Event(kind, stage, message, data=data or {}))

    @contextmanager
    def _stage(self, name: str, **data: Any) -> Iterator[None]:
        start = time.perf_counter()
        self._emit("stage_started", name, data=data)
        with self.memory.stage(name):
            yield
            give_back()
        self._emit("stage_finished", name, data={"seconds": round(time.perf_counter() - start, 3)})


def _require_sense(perplexity: Perplexity, vocabulary: int, source: SourceIdentity) -> None:
    """Raise RunError where the source does far worse than guessing: a wrong tokenizer, or damaged weights."""
    if perplexity.perplexity > 4 * vocabulary:
        raise RunError(
            f"its perplexity is {perplexity.perplexity:.3g}, far worse than guessing among {vocabulary} tokens",
            source.id,
            "Its tokenizer belongs to another model, or its weights are damaged",
        )
