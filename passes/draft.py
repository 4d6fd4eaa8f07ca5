"""Pass `draft`: where the tokens that speculative decoding verifies come from, and whether they pay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ..optimizer.base import Context, Options, Pass, PassReport, PlanItem
from ..optimizer.errors import LlmoptError, RunError
from ..optimizer.runtime_spec import DraftSpec

if TYPE_CHECKING:
    from ..optimizer.model import LoadedModel, ModelInfo, SourceIdentity
    from .draft_measure import Measured

OWNED = {"model": "model", "revision": "model", "max_ngram": "ngram", "history": "suffix", "layers": "layer_skip"}
"""Options → the kind that they belong to; kind `auto` takes all but `layers`."""


FORCED = 3
"""Drafts a step in a second measurement of a model whose drafts the adaptive number never makes."""


class Draft(Pass):
    """Chooses a draft source, measures its acceptance and speed-up on this machine, and records it in the RuntimeSpec.

    Changes no weights. `ngram` proposes what followed the last tokens earlier in the text (prompt lookup, Saxena 2023),
    `suffix` what followed the text's longest suffix that occurred before, `model` lets a second, smaller model propose
    (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; its tokenizer must be the model's own), `layer_skip` the
    model's own layers in part (Zhang et al. 2023, https://arxiv.org/abs/2309.08168). With `distill` the second model is
    made here (`draft_distill.py`). `auto` takes the fastest of all
    that the model allows. What would slow the user down is refused with the figures, unless `force` is set.
    """

    name = "draft"
    changes_weights: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"draft"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"draft"})

    class Config(Options):
        kind: Literal["ngram", "suffix", "model", "layer_skip", "auto"] = Field(
            "ngram", description="`ngram`, `suffix`, `model`, `layer_skip`, or `auto`: the fastest of them as measured."
        )
        num_tokens: int | None = Field(
            None, ge=1, le=64, description="Tokens drafted a step; `auto` or none adapts to acceptance and load."
        )
        max_ngram: int = Field(3, ge=1, le=32, description="Longest n-gram that `ngram` looks up.")
        history: int | None = Field(
            None,
            ge=2,
            description="Tokens of earlier outputs, of any request, that `suffix` also looks at; none: none.",
        )
        layers: list[int] | None = Field(
            None, min_length=1, description="Layers that `layer_skip` runs, ascending; none: chosen by measurement."
        )
        model: str | None = Field(None, description="Draft model for kind `model`: folder, hub id or short name.")
        revision: str | None = Field(None, description="Revision of the draft model on the hub.")
        distill: bool = Field(
            False,
            description="Make the draft model for kind `model`: some of the model's layers, trained on what it writes.",
        )
        minutes: float = Field(10.0, gt=0, description="Time for `distill`.")
        distill_layers: int | None = Field(
            None, ge=1, description="Layers of the draft model that `distill` makes; none: a tenth of the model's."
        )
        measure: bool = Field(True, description="Measure on this machine; without it nothing can be refused.")
        min_speedup: float = Field(
            1.0, ge=0, description="Least speed-up over plain decoding; below it by more than its error is a refusal."
        )
        min_acceptance: float = Field(0.0, ge=0, le=1, description="Least share of drafts that must be accepted.")
        force: bool = Field(False, description="Keep a pairing that is below the limits, with a note.")
        prompts: list[str] | None = Field(
            None, min_length=1, description="Prompts to measure on; none: beginnings of calibration sequences."
        )
        num_prompts: int = Field(6, ge=1, le=256, description="Calibration sequences to measure on.")
        new_tokens: int = Field(48, ge=8, le=2048, description="Tokens to generate for each prompt.")

        @field_validator("num_tokens", mode="before")
        @classmethod
        def _automatic(cls, value: Any) -> Any:
            return None if value == "auto" else value

        @model_validator(mode="after")
        def _possible(self) -> Draft.Config:
            if self.kind == "model" and not self.model and not self.distill:
                raise ValueError(
                    "kind: model needs `model`, the draft model's folder, hub id or short name, or `distill: true`"
                )
            if self.distill and (self.model or self.kind not in ("model", "auto")):
                raise ValueError(
                    "`distill` makes the draft model of kind: model (or auto), which then needs no `model`"
                )
            if not self.distill and {"minutes", "distill_layers"} & self.model_fields_set:
                raise ValueError("`minutes` and `distill_layers` belong to `distill: true`")
            if self.kind not in ("model", "auto") and (self.model or self.revision):
                raise ValueError(f"`model` and `revision` belong to kind: model, not to kind: {self.kind}")
            for option in ("max_ngram", "history", "layers"):
                owner = OWNED[option]
                fits = self.kind == owner or (self.kind == "auto" and option != "layers")
                if option in self.model_fields_set and getattr(self, option) is not None and not fits:
                    raise ValueError(f"`{option}` belongs to kind: {owner}, not to kind: {self.kind}")
            if not self.measure and (self.kind == "auto" or (self.kind == "layer_skip" and self.layers is None)):
                raise ValueError(f"kind: {self.kind} is chosen by measurement, which `measure: false` forbids")
            return self

    config: Config

    def plan(self, info: ModelInfo) -> PlanItem:
        """For a draft model: finds it and compares tokenizers; what does not hold is a refusal."""
        refusals, notes = [], []
        if self.config.model:
            try:
                source = self._source()
                self._check(source, info.source.folder, info.trust_remote_code)
                notes.append(f"draft model: {source.id}, same tokenizer")
            except LlmoptError as error:
                refusals.append(str(error))
        if self.config.distill:
            refusals += self._undistillable(info)
        return PlanItem(
            summary=f"speculative decoding with {self._description(self.config.kind)}",
            refusals=refusals,
            notes=notes,
            runtime={"draft": {"kind": self.config.kind, "model": self.config.model}},
            seconds=60 * self.config.minutes if self.config.distill else 0.0,
        )

    def _undistillable(self, info: ModelInfo) -> list[str]:
        from .draft_student import layers_of

        try:
            layers_of(info.skeleton)
        except RunError as error:
            return [str(error)]
        return []

    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Measure and write the specification.

        Raises RunError where the draft's tokenizer is not the model's, and, with the figures, where the pairing is
        below `min_speedup` or `min_acceptance` without `force`.
        """
        source = self._source() if self.config.model else None
        if source is not None:
            self._check(source, model.source.folder, model.trust_remote_code)
        details: dict[str, Any] = {}
        with weights_in_memory(model) as reason:
            if self.config.distill:
                if reason is not None:
                    raise RunError(f"a draft model cannot be distilled: {reason}", self.name)
                source = self._distilled(model, context, details)
            specs = self._specs(source)
            spec, words = specs[0], ""
            if self.config.measure and reason is None:
                best = self._choose(model, context, specs, source, details)
                spec, words = best.spec, f" ({best})"
            elif self.config.measure and self.config.kind in ("ngram", "suffix", "model"):
                context.note("note", f"drafts were not measured: {reason}")
            elif self.config.measure:
                raise RunError(f"kind: {self.config.kind} is chosen by measurement, but {reason}", self.name)
        model.runtime.draft = spec
        known = spec.model_dump(exclude_none=True)
        if self.config.distill and spec.kind == "model":
            known["model"] = "draft"  # the folder in the artifact
        return PassReport(
            f"speculative decoding with {self._description(spec.kind)}{words}", details={**known, **details}
        )

    def _distilled(self, model: LoadedModel, context: Context, details: dict[str, Any]) -> SourceIdentity:
        """The draft model that is made of the model, in the cache."""
        from ..optimizer.sources import resolve
        from .draft_distill import Distillation, folder_of
        from .draft_measure import take_prompts, target_runner

        options = self.config.model_dump(include={"minutes", "distill_layers", "prompts", "num_prompts"})
        held_out = take_prompts(model, context, self.config.prompts, self.config.num_prompts)
        folder = folder_of(model, context, {**options, "calibration": context.calibration.source.identity()})
        making = Distillation(model, context, folder, self.config.minutes, self.config.distill_layers, held_out)
        with target_runner(model, num_blocks=160) as runner:
            details["distillation"] = making.run(runner)
        return resolve(folder / "draft")

    def _choose(
        self,
        model: LoadedModel,
        context: Context,
        specs: list[DraftSpec],
        source: SourceIdentity | None,
        details: dict[str, Any],
    ) -> Measured:
        from .draft_measure import measure, take_prompts, target_runner

        prompts = take_prompts(model, context, self.config.prompts, self.config.num_prompts)
        with target_runner(model) as runner:
            for spec in [s for s in specs if s.kind == "layer_skip" and s.layers is None]:
                tried = self._choose_layers(runner, prompts)
                if tried is None and self.config.kind != "auto":
                    raise RunError(f"{type(runner).__name__} cannot run a part of the model's layers", self.name)
                if tried is None:
                    specs.remove(spec)
                    continue
                details["layer_trials"] = tried[:8]
                spec.layers = list(tried[0]["layers"])
            found = measure(
                runner, specs, None if source is None else source.folder, prompts, self.config.new_tokens, context
            )
            for one in found:
                if one.spec.num_tokens is None and not one.drafted and one.spec.kind in ("model", "layer_skip"):
                    fixed = one.spec.model_copy(update={"num_tokens": FORCED})
                    folder = None if source is None else source.folder
                    forced = measure(runner, [fixed], folder, prompts, self.config.new_tokens, context)
                    one.more[f"{FORCED}_drafts_forced"] = forced[0].as_dict()
        details["measured"] = {one.spec.kind: one.as_dict() for one in found}
        best = max(found, key=lambda one: one.speedup)
        if best.spec.kind in ("model", "layer_skip"):
            best.spec.acceptance = round(best.acceptance, 4)
        self._judge(best, context, found)
        return best

    def _choose_layers(self, runner: Any, prompts: list[list[int]]) -> list[dict[str, Any]] | None:
        """The candidates as dicts, the most promising first; None where the runner cannot run a part."""
        from dataclasses import asdict
        from functools import partial

        from ..runtime.draft_setup import own_layers, runs_parts
        from ..runtime.engine.draft_costs import measure as measure_costs
        from ..runtime.engine.draft_layers import DEPTH, try_layers

        texts = [prompt for prompt in prompts if len(prompt) > DEPTH]
        if not runs_parts(runner) or not texts:
            return None
        trials = try_layers(runner, partial(own_layers, runner), measure_costs(runner), texts)
        return [asdict(trial) for trial in trials]

    def _judge(self, best: Measured, context: Context, found: list[Measured]) -> None:
        faults = []
        if not best.drafted and best.spec.kind in ("model", "layer_skip"):
            faults.append("at its cost no draft was worth making")
        if best.speedup * (1 + best.error) < self.config.min_speedup:
            faults.append(f"it reaches {best.speedup:.2f} of the {self.config.min_speedup:g} times asked for")
        if best.acceptance < self.config.min_acceptance:
            faults.append(f"{best.acceptance:.0%} are accepted of the {self.config.min_acceptance:.0%} asked for")
        if not faults:
            return
        figures = "; ".join(str(one) for one in found)
        if not self.config.force:
            raise RunError(
                f"drafting by {best.spec.kind} does not pay: {' and '.join(faults)}. Measured: {figures}",
                where=self.name,
                what_to_do="Leave the pass out, choose another kind, or keep it with force: true.",
            )
        context.note("note", f"kept by force although {' and '.join(faults)}")

    def _specs(self, source: SourceIdentity | None) -> list[DraftSpec]:
        """What to try: one, or for `auto` all that the options allow."""
        config = self.config
        kinds: list[Any] = [config.kind]
        if config.kind == "auto":
            kinds = ["ngram", "suffix", *(["model"] if source else []), "layer_skip"]
        specs = []
        for kind in kinds:
            spec = DraftSpec(kind=kind, num_tokens=config.num_tokens, max_ngram=config.max_ngram)
            if kind == "suffix":
                spec.history = config.history
            if kind == "layer_skip":
                spec.layers = config.layers
            if kind == "model" and source is not None:
                spec.model = source.id if source.kind == "hub" else str(source.folder)
                spec.sha256, spec.revision = source.sha256, source.revision
            specs.append(spec)
        return specs

    def _description(self, kind: str) -> str:
        count = self.config.num_tokens or "an adaptive number of"
        sources = {
            "ngram": f"n-grams of up to {self.config.max_ngram}",
            "suffix": "the text's repeated suffixes",
            "model": "a part of the model, distilled" if self.config.distill else str(self.config.model),
            "layer_skip": "a part of the model's own layers",
            "auto": "the fastest source",
        }
        return f"{count} tokens from {sources[kind]}"

    def _source(self) -> SourceIdentity:
        from ..optimizer.sources import resolve

        return resolve(self.config.model or "", self.config.revision)

    def _check(self, draft: SourceIdentity, target: Path, trust_remote_code: bool) -> None:
        from ..runtime.tokenizer_files import open_tokenizer
        from .tokenizer_match import first_mismatch

        mismatch = first_mismatch(
            open_tokenizer(target, trust_remote_code), open_tokenizer(draft.folder, trust_remote_code)
        )
        if mismatch is not None:
            raise RunError(
                f"the draft model's tokenizer is not the model's: {mismatch}",
                where=f"{self.name}.model {self.config.model}",
                what_to_do="Choose a draft model of the same family.",
            )


@contextmanager
def weights_in_memory(model: LoadedModel) -> Iterator[str | None]:
    """All weights for the duration, yielding None; or, where they do not fit beside a runner's copy, the reason."""
    if model.weights is None:
        yield None
        return
    from ..runtime.memory import available_memory

    size, free = model.weights.nbytes, available_memory()
    if 2.2 * size > free:
        yield f"the model takes {size / 2**20:,.0f} MiB, twice, and {free / 2**20:,.0f} MiB are available"
        return
    with model.loaded(""):
        yield None
