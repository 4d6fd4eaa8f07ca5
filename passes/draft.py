"""Pass `draft`: where the tokens that speculative decoding verifies come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from ..optimizer.base import Context, Options, Pass, PassReport, PlanItem
from ..optimizer.errors import LlmoptError, RunError
from ..optimizer.runtime_spec import DraftSpec

if TYPE_CHECKING:
    from ..optimizer.model import LoadedModel, ModelInfo, SourceIdentity


class Draft(Pass):
    """Records a draft source in the RuntimeSpec; changes no weights.

    `ngram` proposes what followed the last tokens earlier in the text (prompt lookup, Saxena 2023). `model` lets a
    second, smaller model propose (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192); its tokenizer must be the
    model's own: vocabulary, special tokens and the encoding of probe texts are compared.
    """

    name = "draft"
    changes_weights: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"draft"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"draft"})

    class Config(Options):
        kind: Literal["ngram", "model"] = Field("ngram", description="`ngram` (no second model) or `model`.")
        num_tokens: int | None = Field(
            None, ge=1, le=64, description="Tokens drafted a step; none adapts to how many were accepted."
        )
        max_ngram: int = Field(3, ge=1, le=32, description="Longest n-gram that `ngram` looks up.")
        model: str | None = Field(None, description="Draft model for kind `model`: folder, hub id or short name.")
        revision: str | None = Field(None, description="Revision of the draft model on the hub.")

        @model_validator(mode="after")
        def _possible(self) -> Draft.Config:
            if self.kind == "model" and not self.model:
                raise ValueError("kind: model needs `model`, the draft model's folder, hub id or short name")
            if self.kind == "ngram" and (self.model or self.revision):
                raise ValueError("`model` and `revision` belong to kind: model, not to kind: ngram")
            if self.kind == "model" and "max_ngram" in self.model_fields_set:
                raise ValueError("`max_ngram` belongs to kind: ngram, not to kind: model")
            return self

    config: Config

    def plan(self, info: ModelInfo) -> PlanItem:
        """For `model`: finds the draft and compares tokenizers; what does not hold is a refusal."""
        refusals, notes = [], []
        if self.config.kind == "model":
            try:
                source = self._source()
                self._check(source, info.source.folder, info.trust_remote_code)
                notes.append(f"draft model: {source.id}, same tokenizer")
            except LlmoptError as error:
                refusals.append(str(error))
        return PlanItem(
            summary=f"speculative decoding with {self._description()}",
            refusals=refusals,
            notes=notes,
            runtime={"draft": {"kind": self.config.kind, "model": self.config.model}},
        )

    def run(self, model: LoadedModel, context: Context) -> PassReport:
        """Write the specification. Raises RunError where the draft's tokenizer is not the model's."""
        spec = DraftSpec(
            kind=self.config.kind,
            num_tokens=self.config.num_tokens,
            max_ngram=self.config.max_ngram,
            model=self.config.model,
            revision=self.config.revision,
        )
        if self.config.kind == "model":
            source = self._source()
            self._check(source, model.source.folder, model.trust_remote_code)
            spec.sha256 = source.sha256
            spec.revision = source.revision
            if source.kind != "hub":
                spec.model = str(source.folder)
        model.runtime.draft = spec
        return PassReport(f"speculative decoding with {self._description()}", details=spec.model_dump())

    def _description(self) -> str:
        count = self.config.num_tokens or "an adaptive number of"
        if self.config.kind == "ngram":
            return f"{count} tokens from n-grams of up to {self.config.max_ngram}"
        return f"{count} tokens from {self.config.model}"

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
