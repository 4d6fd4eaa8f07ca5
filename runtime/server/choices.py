"""From outputs to the parts of OpenAI's answers: texts, logprobs, finish reasons, tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .job import deadline_passed

if TYPE_CHECKING:
    from ..engine.logprobs import TokenLogprobs
    from ..engine.outputs import RequestOutput
    from .job import Job
    from .model import ServedModel


@dataclass
class Piece:
    """News of one sequence, or all of it: outputs joined."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, output: RequestOutput) -> None:
        self.texts.append(output.new_text)
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


async def collect(job: Job) -> dict[int, Piece]:
    """The whole outputs of a job, by sequence. Raises ApiError where the deadline left nothing."""
    pieces = {index: Piece() for index in range(job.num_sequences)}
    async for batch in job.outputs():
        for index, output in batch:
            pieces[index].add(output)
    if not job.output_tokens and any(piece.finish_reason == "deadline" for piece in pieces.values()):
        raise deadline_passed()
    return pieces


def merge(batch: Iterable[tuple[int, RequestOutput]]) -> dict[int, Piece]:
    """Outputs that came together, by sequence: a slow reader gets fewer, longer pieces."""
    pieces: dict[int, Piece] = {}
    for index, output in batch:
        pieces.setdefault(index, Piece()).add(output)
    return pieces


class TokenTexts:
    """Tokens as the logprobs of an answer show them."""

    def __init__(self, model: ServedModel) -> None:
        self._vocabulary, self._tokenizer = model.vocabulary, model.tokenizer

    def of(self, token_id: int) -> tuple[str, list[int] | None]:
        """The token's text (U+FFFD for parts of characters) and, where the tokenizer tells, its bytes."""
        if self._vocabulary.exact:
            data = self._vocabulary.token_bytes(token_id)
            return data.decode("utf-8", "replace"), list(data)
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)), None

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` object of a chat's choice."""
        return {"content": [self._chat_entry(each) for each in logprobs], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._chat_token(token, logprob) for token, logprob in entry.top]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self.of(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": data}

    def completion(self, entries: Sequence[TokenLogprobs | int], offset: int) -> dict[str, Any]:
        """The `logprobs` object of a completion's choice; an int stands for a first token, which has no logprob.

        offset: characters of the choice's text before the first of these tokens.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            known = not isinstance(entry, int)
            text = self.of(entry.token_id if not isinstance(entry, int) else entry)[0]
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            values.append(finite(entry.logprob) if not isinstance(entry, int) else None)
            top.append(self._top(entry) if known and not isinstance(entry, int) else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The best tokens by text. The sampled one is among them; of tokens that read alike the best one counts."""
        found: dict[str, float] = {}
        for token, logprob in [*entry.top, (entry.token_id, entry.logprob)] if entry.top else ():
            found.setdefault(self.of(token)[0], finite(logprob))
        return found


def finite(logprob: float) -> float:
    """JSON has no infinity: what is impossible gets a very small number, as in vLLM."""
    return max(logprob, -9999.0)


def tool_call(text: str) -> list[dict[str, Any]] | None:
    """OpenAI's `tool_calls` for a constrained answer; None where it was cut off before its end."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    function = {"name": call["name"], "arguments": arguments}
    return [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}]
