"""Calibration that needs no data: the model writes its own text, from its BOS token and a few openings.

After LLM-QAT (Liu et al. 2023, https://arxiv.org/abs/2305.17888), which found text of the model itself better than
other text. Sampled at temperature 1 from the smallest set of tokens with probability 0.95, each text with its own seed.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.memory import available_memory
from .errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..runtime.llm import LLM
    from .model import SourceIdentity

OPENINGS = (
    "The", "In 19", "How do I", "def ", "1.", "She said", "According to", "# ", "Question:", "When the", "A", "I",
    "import ", "It is", "<p>",
)  # fmt: skip
"""Beginnings that call up different kinds of text."""
TOP_P = 0.95
VERSION = 1
"""Part of the key under which texts are kept; raised when the way they are written changes."""
ROUNDS = 4
SHORTEST = 16
TOGETHER = 64
"""Texts that are written at once, so that there is progress to tell."""
EXCERPT = 24
"""Tokens of a given sequence that the model goes on from."""

Progress = Callable[[int, int, float], None]
"""Is told of texts written, of all texts, and of the seconds left."""


class OwnText:
    """Has the model at `source`, unchanged by any pass, write. Texts are kept below `cache`, so that a run that goes on
    after a crash sees the same tokens."""

    def __init__(
        self,
        source: SourceIdentity,
        *,
        seed: int,
        num_samples: int,
        cache: Path | None = None,
        trust_remote_code: bool = False,
        engine: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        self.source, self.seed, self.num_samples = source, seed, num_samples
        self.cache, self.trust_remote_code, self.engine, self.progress = cache, trust_remote_code, engine, progress

    @contextmanager
    def _opened(self) -> Iterator[LLM]:
        """The model. Raises RunError where memory is short for it."""
        from ..runtime.llm import load

        _require_memory(self.source)
        options: dict[str, Any] = {"engine": self.engine, "trust_remote_code": self.trust_remote_code, "draft": False}
        with load(self.source.folder, **options) as llm:
            yield llm

    def _go_on(self, llm: LLM, prompts: Sequence[list[int]], length: int, top_p: float, seed: int) -> list[list[int]]:
        """Prompts with what the model writes after them, token ids, `length` at most; without texts below SHORTEST."""
        from ..runtime.engine.sampling_params import SamplingParams

        ends = end_tokens(self.source.folder, llm.tokenizer)
        params = [
            SamplingParams(
                temperature=1.0,
                top_p=top_p,
                seed=(seed + i) % 2**63,
                max_new_tokens=length - len(prompt),
                ignore_eos=True,
                stop_token_ids=ends,
            )
            for i, prompt in enumerate(prompts)
        ]
        new: list[list[int]] = []
        began = time.monotonic()
        for start in range(0, len(prompts), TOGETHER):
            chunk = slice(start, start + TOGETHER)
            written = llm.generate(prompts[chunk], params[chunk])
            assert isinstance(written, list)
            new += [[*one.prompt_token_ids, *one.token_ids] for one in written]
            if self.progress is not None:
                self.progress(len(new), len(prompts), (time.monotonic() - began) / len(new) * (len(prompts) - len(new)))
        return [text for text in new if len(text) >= min(SHORTEST, length)]

    def _require_some(self, texts: list[list[int]], hint: str) -> list[list[int]]:
        if not texts:
            raise RunError(f"the model ended each of its own texts within {SHORTEST} tokens", self.source.id, hint)
        return texts


class SelfSource(OwnText):
    """Texts that the model writes by itself; every second one from BOS alone, if it has one.

    A text ends at the model's end-of-text token; a token that the chat template uses inside a conversation does not end
    it.
    """

    kind, whole_windows, places_bos = "self", False, True

    def __init__(self, source: SourceIdentity, *, sequence_length: int, **options: Any) -> None:
        super().__init__(source, **options)
        self.sequence_length = sequence_length

    def documents(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[list[int]]:
        return self._texts

    def identity(self) -> str:
        sizes = [self.num_samples, self.sequence_length, self.seed]
        return json.dumps(["self", VERSION, self.source.sha256, self.engine, sizes, _made_by()])

    def describe(self) -> dict[str, Any]:
        return {"texts": len(self._texts), "temperature": 1.0, "top_p": TOP_P, "seed": self.seed}

    @cached_property
    def _texts(self) -> list[list[int]]:
        return kept(self.cache, self.identity(), self._write)

    def _write(self) -> list[list[int]]:
        wanted = self.num_samples * self.sequence_length
        with self._opened() as llm:
            starts, length = openings(llm.tokenizer), self.sequence_length
            if llm.context_length is not None:
                length = min(length, llm.context_length)
            texts: list[list[int]] = []
            for number in range(ROUNDS):
                missing = wanted - sum(map(len, texts))
                count = -(-missing // length)
                if count <= 0:
                    break
                prompts = [starts[(len(texts) + i) % len(starts)][: length - 1] for i in range(count)]
                seed = self.seed + 1_000_003 * number
                texts += self._go_on(llm, prompts, length, TOP_P, seed)
        return self._require_some(texts, "Give calibration.text, calibration.chat or calibration.dataset")


class Continuations(OwnText):
    """Further sequences beside those of another source: the model goes on from excerpts of them.

    Calibration text is short beside what learned rounding can fit to; the model's own text makes it longer, in the
    model's own distribution (temperature 1, all tokens). Each of `num_samples` texts goes on from EXCERPT tokens out of
    a given sequence, and is as long as the longest of these, or ends where the model ends it.
    """

    def identity(self) -> str:
        """What the texts depend on, beside the given sequences; for cache keys."""
        return json.dumps(
            ["continued", VERSION, self.source.sha256, self.engine, self.num_samples, self.seed, *_made_by()]
        )

    def sequences(self, given: Sequence[list[int]], head: list[int]) -> list[list[int]]:
        """The texts, as many as asked for. given: token ids, each beginning with `head`. Raises RunError."""
        flat = json.dumps([self.identity(), given])
        return kept(self.cache, flat, lambda: self._write(given, head))

    def _write(self, given: Sequence[list[int]], head: list[int]) -> list[list[int]]:
        length, draw = max(map(len, given)), random.Random(self.seed)
        prompts = []
        for i in range(self.num_samples):
            text = given[i % len(given)][len(head) :]
            start = draw.randrange(max(1, len(text) - EXCERPT))
            prompts.append([*head, *text[start : start + EXCERPT]][: length - 1])
        with self._opened() as llm:
            texts = self._go_on(llm, prompts, length, 1.0, self.seed)
        return self._require_some(texts, "Leave calibration.self_samples out")


def _require_memory(source: SourceIdentity) -> None:
    """Writing needs all weights in memory at once, beside what the run holds of them."""
    from ..runtime.weight_files import weight_files

    size = sum(file.stat().st_size for file in weight_files(source.folder))
    free = available_memory()
    if size * 1.2 > free:
        raise RunError(
            f"to write its own calibration text the model needs {size * 1.2 / 2**20:,.0f} MiB, and "
            f"{free / 2**20:,.0f} MiB are available",
            source.id,
            "Give calibration.text, calibration.chat or calibration.dataset",
        )


def openings(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids that texts begin with: BOS alone and the openings in turn, these as the tokenizer encodes texts."""
    texts = [list(tokenizer(text)["input_ids"]) for text in OPENINGS]
    bos = tokenizer.bos_token_id
    if bos is None:
        return texts
    return [start for text in texts for start in ([int(bos)], text)]


def end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a text: the model's end tokens, without those that end a turn in its chat template."""
    from ..runtime.weight_files import read_json

    found: list[Any] = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            found += value if isinstance(value, list) else [value]
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template) if template else ""
    ids = sorted({int(token) for token in found if token is not None})
    tokens: Iterable[Any] = tokenizer.convert_ids_to_tokens(ids)
    return tuple(
        i for i, token in zip(ids, tokens) if not (token and (str(token) in text or _is_eos(i, tokenizer, text)))
    )


def _is_eos(token: int, tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the template puts this token behind turns by the name `eos_token`."""
    return token == tokenizer.eos_token_id and "eos_token" in template


def _made_by() -> list[str | None]:
    """Versions of the libraries that texts depend on."""
    from .environment import library_version

    return [library_version(name) for name in ("llmopt", "torch", "transformers")]


def kept(cache: Path | None, identity: str, write: Callable[[], list[list[int]]]) -> list[list[int]]:
    """The texts of this identity: those kept below `cache`, or newly written ones, which are then kept there."""
    if cache is None:
        return write()
    place = cache / "calibration" / f"{sha256(identity.encode()).hexdigest()}.json"
    texts = _read(place)
    if texts is None:
        texts = write()
        _keep(place, texts)
    return texts


def _read(place: Path) -> list[list[int]] | None:
    try:
        texts = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    fine = (
        isinstance(texts, list) and texts and all(isinstance(t, list) and all(type(i) is int for i in t) for t in texts)
    )
    return texts if fine else None


def _keep(place: Path, texts: list[list[int]]) -> None:
    """Write beside the place and rename; a disk that is full costs the copy, not the run."""
    temporary = place.with_name(f".{place.name}.tmp-{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(texts), encoding="utf-8")
        os.replace(temporary, place)
    except OSError:
        temporary.unlink(missing_ok=True)
