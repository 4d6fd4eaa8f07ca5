"""LLM, the user's handle on a model that runs: what `llmopt.load` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..optimizer.errors import RunError, UsageError
from .chat import check_ids, check_length, encode_prompt, split_prompts
from .completion import Backend, Chunk, Completion, collect

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..optimizer.runtime_spec import RuntimeSpec
    from .engine.loop import EngineLoop
    from .engine.protocols import ModelRunner
    from .engine.sampling_params import SamplingParams
    from .foreign import ForeignModel
    from .open import OpenedModel

EngineName = Literal["auto", "static", "native", "onnxruntime", "llamacpp"]


@dataclass(frozen=True)
class Score:
    """Log-probabilities (natural logarithm) of a text's tokens given those before; None for the first."""

    token_ids: list[int]
    logprobs: list[float | None]

    @property
    def total(self) -> float:
        """Log-probability of the text after its first token."""
        return sum(value for value in self.logprobs if value is not None)


def load(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    engine: EngineName = "auto",
    trust_remote_code: bool = False,
    verify: bool = True,
    attention: str | None = None,
    draft: bool | dict[str, Any] = True,
    **engine_options: Any,
) -> LLM:
    """Open an artifact or a plain Hugging Face folder and make it ready to generate.

    device: "auto" (CUDA where there is one), "cpu", "cuda" …; dtype: "auto" or float32, bfloat16, float16.
    engine: "native" (continuous batching), "static" (`StaticBatch`), or "auto": native where it supports the model,
        else static with a note.
    verify: check the artifact's hashes. attention: overrides the RuntimeSpec's backend. draft: False turns the
        RuntimeSpec's speculation off, a dict takes its place (`{"kind": "ngram"}`: fields of DraftSpec).
        engine_options: further settings of the native engine; of the static one `max_batch`, and `emulate=True`: layers
        with int8 or e4m3 inputs then compute as compressed-tensors' emulation does, with the bits of plain transformers
        (slower: for comparisons).

    Raises UsageError for a wrong argument, RunError for a damaged model or one that asks for what is not there.
    """
    from .garbage import collection_paused

    with collection_paused():
        from .foreign import find_format, open_foreign, written_folder
        from .open import check_folder, open_model
        from .recorded_model import RECORD_FAULTS, open_recorded

        checked, fault = check_folder(written_folder(path) or path, verify), None
        if (foreign := find_format(checked.path)) is not None:
            options = {**engine_options, "attention": attention, "draft": draft}
            return LLM(*open_foreign(foreign, checked, device, dtype, engine, options))
        if engine in ("auto", "native") and attention is None and not trust_remote_code:
            try:
                recorded = open_recorded(checked, device, dtype, engine_options)
                if recorded is not None:
                    return LLM.from_opened(recorded, engine="native", draft=draft, release=True, **engine_options)
            except RECORD_FAULTS as error:  # where it is not the record's, opening in full raises it again
                fault = error
        opened = open_model(checked, device, dtype, trust_remote_code=trust_remote_code, attention=attention)
        opened.as_stored = True
        if fault is not None:
            opened.note(f"opened in full: the record of an earlier load did not hold ({fault})", "fallback")
        return LLM.from_opened(opened, engine=engine, draft=draft, release=True, **engine_options)


class LLM:
    """Generates text from one model. Make one with `llmopt.load` or `LLM.from_opened`; close it, or use `with`."""

    def __init__(self, opened: OpenedModel | ForeignModel, backend: Backend) -> None:
        self._opened, self._backend = opened, backend
        self._closed = False

    @classmethod
    def from_opened(
        cls,
        opened: OpenedModel,
        *,
        engine: EngineName = "auto",
        draft: bool | dict[str, Any] = True,
        release: bool = False,
        **engine_options: Any,
    ) -> LLM:
        """An LLM over a model that `open_model` opened. Raises as `load` does.

        release: the engine may take the weights over, so that they are in memory once; `opened.module` can then no
        longer run by itself.
        """
        from .backends import make_backend
        from .draft_setup import with_draft

        if isinstance(draft, dict):
            with_draft(opened, draft)
            draft = True
        return cls(opened, make_backend(opened, engine, draft, release, engine_options))

    @property
    def backend(self) -> str:
        """What runs the model: "static" or "native"; "onnxruntime" … for an artifact in another format."""
        return self._backend.name

    @property
    def runtime(self) -> RuntimeSpec:
        """What the artifact asks of the runtime."""
        return self._opened.runtime

    @property
    def notes(self) -> list[dict[str, str]]:
        """What was decided at load: dicts of `stage`, `kind` ("note" or "fallback") and `message`."""
        return [*self._opened.notes, *self._backend.notes]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._opened.tokenizer

    @property
    def module(self) -> PreTrainedModel:
        """The torch module. An engine may have put its own attention into it, or have taken its weights over: use
        `open_model` for a module to call."""
        return self._opened.module

    @property
    def runner(self) -> ModelRunner | None:
        """What runs the engine's steps; None where no engine runs. For measuring, while nothing is being generated."""
        engine = getattr(self._backend, "engine", None)
        return None if engine is None else engine.runner

    @property
    def loop(self) -> EngineLoop | None:
        """What steps the engine, for what submits requests one by one (a server, a benchmark); None without engine."""
        return getattr(self._backend, "loop", None)

    @property
    def weight_bytes(self) -> int:
        """Bytes that weights hold in memory, each storage once: the module's and those the engine packed."""
        return self._opened.weight_bytes() + self._backend.extra_weight_bytes

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The artifact's manifest; None for a plain folder."""
        return self._opened.manifest

    @property
    def vocab_size(self) -> int:
        """Token ids lie in 0 … vocab_size - 1."""
        return self._backend.vocab_size

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and output together."""
        limits = [n for n in (self._backend.context_length, self._opened.context_length) if n]
        return min(limits, default=None)

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int | None = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        **more: Any,
    ) -> Completion | list[Any]:
        """Continue one prompt or many.

        prompts: a str, a chat (list of messages), token ids, or a list of any of these.
        params: SamplingParams, or one for each prompt, in the place of the keywords; `more` are further fields of it.
        Greedy by default. Returns one Completion for one prompt, a list for a list; with `n` > 1, a list of n
        Completions in the place of each. Raises UsageError for a bad prompt or parameter before anything runs.
        """
        items, single = split_prompts(prompts)
        if params is None:
            params = self._params(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                stop=stop,
                **more,
            )
        elif more:
            raise UsageError(f"{sorted(more)[0]!r} is given beside params", "generate", "Put it into the params.")
        ids, each = self._prepare(items, params, single)
        found = collect(self._backend.stream(ids, each), ids, [p.n for p in each])
        results = [sequences if p.n > 1 else sequences[0] for sequences, p in zip(found, each)]
        return results[0] if single else results

    def stream(self, prompt: Any, params: SamplingParams | None = None, **sampling: Any) -> Iterator[Chunk]:
        """Continue one prompt, chunk by chunk: `chunk.text` joined is the text; the last has a `finish_reason`.

        Takes generate's keywords (`max_new_tokens` 128 and greedy by default). Errors are raised at the call.
        """
        items, single = split_prompts(prompt)
        if not single:
            raise UsageError("stream takes one prompt", "stream", "Use generate for a list.")
        if params is None:
            params = self._params(**{"max_new_tokens": 128, "temperature": 0.0, **sampling})
        elif sampling:
            raise UsageError(f"{sorted(sampling)[0]!r} is given beside params", "stream", "Put it into the params.")
        ids, each = self._prepare(items, params, single)
        return self._chunks(ids, each)

    def _chunks(self, ids: list[list[int]], params: list[SamplingParams]) -> Iterator[Chunk]:
        for chunk in self._backend.stream(ids, params):
            if chunk.error is not None:
                raise chunk.error
            yield chunk

    async def agenerate(self, prompts: Any, params: Any = None, **sampling: Any) -> Any:
        """`generate` for asyncio: runs in a thread, so that the event loop stays free."""
        return await asyncio.to_thread(lambda: self.generate(prompts, params, **sampling))

    def score(self, texts: Any) -> Score | list[Score]:
        """How likely the model finds texts (or token ids): one Score for one, a list for a list."""
        items, single = split_prompts(texts)
        ids, each = self._prepare(items, self._params(max_new_tokens=0, prompt_logprobs=0), single)
        found = collect(self._backend.stream(ids, each), ids, [1] * len(ids))
        scores = [
            Score(one.prompt_token_ids, [None if t is None else t.logprob for t in one.prompt_logprobs or [None]])
            for (one,) in found
        ]
        return scores[0] if single else scores

    def close(self) -> None:
        """Free the backend and what it started. Safe to call twice; generating afterwards is an error."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM {self._opened.architecture} from {self._opened.folder}, backend {self.backend}>"

    def _params(self, **values: Any) -> SamplingParams:
        from .engine.sampling_params import SamplingParams

        return SamplingParams(**values)

    def _prepare(
        self, items: list[Any], params: SamplingParams | Sequence[SamplingParams], single: bool
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """Token ids and parameters of every prompt, checked. Raises UsageError that names the prompt."""
        if self._closed:
            raise RunError("the model is closed", repr(self), "Load it again.")
        each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * len(items)
        if len(each) != len(items):
            raise UsageError(
                f"{len(each)} params for {len(items)} prompts", "generate", "Give one for all, or one each."
            )
        prompts = []
        for number, (item, own) in enumerate(zip(items, each)):
            where = "prompt" if single else f"prompt {number}"
            ids = encode_prompt(self.tokenizer, item, where)
            check_ids(ids, self._backend.vocab_size, where)
            check_length(len(ids), own.max_new_tokens, self.context_length, where)
            own.check_vocabulary(self._backend.vocab_size)
            prompts.append(ids)
        return prompts, each
