"""A model opened for measuring: run by what answers a user's prompts, or read block by block where it is too large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError, UsageError
from .slices import Logits, module_slices, runner_slices, streamed_slices
from .windows import Window

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..optimizer.model import LoadedModel
    from ..runtime.llm import LLM

STREAMED = "streamed"
ENGINES = ("auto", "native", "static")


class Subject:
    """One of `llm` (what `llmopt.load` gives) and `lazy` (a model whose weights stay in their files) is set."""

    def __init__(self, folder: Path, llm: LLM | None = None, lazy: LoadedModel | None = None) -> None:
        self.folder, self.llm, self.lazy = folder, llm, lazy

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.llm.tokenizer if self.llm is not None else self._lazy.tokenizer

    @property
    def vocab_size(self) -> int:
        from ..runtime.cached_forward import vocabulary_size

        return self.llm.vocab_size if self.llm is not None else vocabulary_size(self._lazy.module)

    @property
    def context_length(self) -> int | None:
        from ..runtime.chat import context_length

        return self.llm.context_length if self.llm is not None else context_length(self._lazy.config)

    def slices(self, windows: Sequence[Window], rows: int) -> Logits:
        """See `slices.py`."""
        if self.llm is None:
            return streamed_slices(self._lazy, windows, rows)
        if self.llm.runner is None:
            return module_slices(self.llm.module, windows, rows)
        return runner_slices(self.llm.runner, windows, rows)

    def facts(self) -> dict[str, Any]:
        """How it runs: `engine`, `runner`, `device`, `dtype`, `kv_cache`, `kv_sliding`, `weight_bytes`, `notes`."""
        from ..runtime import kv_settings

        if self.llm is None:
            weights = self._lazy.weights
            return {
                "engine": STREAMED,
                "runner": None,
                "device": "cpu",
                "dtype": str(self._lazy.dtype).removeprefix("torch."),
                "kv_cache": "auto",
                "kv_sliding": None,
                "weight_bytes": weights.nbytes if weights is not None else None,
                "notes": [_note("the model is larger than memory allows, so it is read block by block")],
            }
        runner = self.llm.runner
        dtype = getattr(runner, "dtype", None) or self.llm.module.dtype
        return {
            "engine": self.llm.backend,
            "runner": type(runner).__name__ if runner is not None else None,
            "device": str(getattr(runner, "device", None) or self.llm.module.device),
            "dtype": str(dtype).removeprefix("torch."),
            "kv_cache": kv_settings.applied(runner),
            "kv_sliding": _sliding(runner),
            "weight_bytes": self.llm.weight_bytes,
            "notes": self.llm.notes,
        }

    def close(self) -> None:
        """Free it. Safe to call twice."""
        if self.llm is not None:
            self.llm.close()

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _lazy(self) -> LoadedModel:
        assert self.lazy is not None
        return self.lazy


def open_subject(
    folder: Path,
    *,
    engine: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    kv_dtype: str | None = None,
    max_memory: int | None = None,
) -> Subject:
    """Open a folder as `llmopt.load` does, its RuntimeSpec applied; draft models are left out (they change no token).

    kv_dtype: the KV cache's, in the place of the RuntimeSpec's. max_memory: bytes; a model that takes more, or more
    than the machine has, is streamed. Raises UsageError for a wrong argument, RunError for a damaged model or one that
    does not fit and cannot be streamed.
    """
    from ..runtime.llm import load
    from .proof import proof_device
    from .proof_streamed import too_large

    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r}", what_to_do=f"Use one of {', '.join(ENGINES)}.")
    if engine == "auto" and kv_dtype is None and too_large(folder, max_memory):
        return Subject(folder, lazy=open_streamed(folder, dtype, trust_remote_code))
    options: dict[str, Any] = {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    llm = load(
        folder,
        device=proof_device(folder, device),
        dtype=dtype,
        engine=engine,  # type: ignore[arg-type]
        trust_remote_code=trust_remote_code,
        draft=False,
        **options,
    )
    return Subject(folder, llm=llm)


def open_streamed(folder: Path, dtype: str = "auto", trust_remote_code: bool = False) -> LoadedModel:
    """The folder as a lazy model, packed layers packed. Raises RunError that says why where it cannot be one."""
    opened = try_streamed(folder, dtype, trust_remote_code)
    if isinstance(opened, str):
        raise RunError(f"the model does not fit into memory, and cannot be measured in parts: {opened}", str(folder))
    return opened


def try_streamed(folder: Path, dtype: str = "auto", trust_remote_code: bool = False) -> LoadedModel | str:
    """The same; a sentence that says why where it cannot be."""
    from ..optimizer.model import LoadedModel, SourceIdentity
    from ..runtime.lazy import open_lazy
    from ..runtime.open import check_folder, open_config, quiet_transformers, resolve_dtype
    from ..runtime.tokenizer_files import open_tokenizer

    checked = check_folder(folder)
    with quiet_transformers():
        config = open_config(folder, trust_remote_code)
        tokenizer = open_tokenizer(folder, trust_remote_code)
        wanted, stored = resolve_dtype(dtype, checked.runtime, config), getattr(config, "dtype", None)
        opened = open_lazy(folder, config, wanted, str(folder), trust_remote_code, packed=True)
    if isinstance(opened, str):
        return opened
    module, weights = opened
    weights.converts = weights.converts or stored not in (None, wanted)  # building the module sets the config's dtype
    return LoadedModel(module, tokenizer, SourceIdentity(str(folder), "folder", folder, ""), weights=weights)


def require_same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UsageError where two tokenizers encode the probe text otherwise, so that tokens do not compare."""
    from .reference import probe_ids

    if probe_ids(one) != probe_ids(other):
        raise UsageError(
            "the tokenizers of the two models differ, so their distributions over tokens cannot be compared",
            where,
            "Evaluate each by itself and compare bits per byte.",
        )


def _sliding(runner: Any) -> dict[str, int] | None:
    """First and last tokens that a sliding KV cache keeps; None where it keeps all."""
    sliding = getattr(runner, "sliding", None)
    return None if sliding is None else {"sinks": sliding.sinks, "window": sliding.window}


def _note(message: str) -> dict[str, str]:
    return {"stage": "evaluate", "kind": "fallback", "message": message}
