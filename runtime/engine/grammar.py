"""Structured output: which tokens a JSON schema or a regular expression allows next (llguidance, extra `grammar`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...optimizer.errors import MissingDependency, RunError, UsageError
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


NOT_ALLOWED = "satisfy the grammar"
"""Part of what llguidance says of a token that cannot follow; its other errors are about its limits."""


class GrammarCompiler:
    """Grammars for one tokenizer. Reading the tokenizer takes up to a second, once, at the first grammar."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._compiled = lru_cache(maxsize=64)(self._compile)
        self._native: Any = None

    def compile(self, params: SamplingParams) -> Grammar:
        """A fresh matcher for one sequence. Compiled grammars are kept, so `n` sequences cost one compilation.

        Raises `MissingDependency` without llguidance, `UsageError` for a schema or an expression that it rejects and
        for tokenizers that are not fast ones.
        """
        if params.regex is not None:
            return Grammar(self._compiled("regex", params.regex).deep_copy())
        schema = params.json_schema
        text = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
        return Grammar(self._compiled("json_schema", text).deep_copy())

    def _compile(self, kind: str, text: str) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise MissingDependency("llguidance", "grammar", "structured output") from None
        try:
            grammar = (
                LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_json_schema(text)
            )
        except ValueError as error:
            raise UsageError(str(error), where=f"sampling parameter {kind}") from None
        matcher = LLMatcher(self._tokens(), grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(matcher.get_error().splitlines()[0], where=f"sampling parameter {kind}")
        matcher.compute_bitmask()  # what allows no first token shows here, not in the middle of the engine's step
        if matcher.is_error():
            raise UsageError(f"no text can match ({_reason(matcher)})", where=f"sampling parameter {kind}")
        return matcher

    def _tokens(self) -> Any:
        if self._native is None:
            from llguidance.hf import from_tokenizer

            try:
                self._native = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos or None)
            except ValueError as error:
                raise UsageError(f"structured output is not possible: {error}", where="tokenizer") from None
        return self._native


class Grammar:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Nothing but an end-of-text token can follow."""
        return self._matcher.is_stopped()

    def allowed_tokens(self, drafts: Sequence[int], vocab_size: int) -> torch.Tensor:
        """bool [vocab_size]: what may follow the accepted tokens and `drafts`. The state stays as it is.

        Where the drafts themselves break the grammar everything is allowed: that position is never reached, since
        the broken draft cannot be sampled.
        """
        import torch

        if drafts:
            count = self._matcher.try_consume_tokens(list(drafts))
            try:
                if count < len(drafts):
                    return torch.ones(vocab_size, dtype=torch.bool)
                return self._mask(vocab_size)
            finally:
                self.rollback(count)
        return self._mask(vocab_size)

    def valid_prefix(self, drafts: Sequence[int]) -> int:
        """How many of the drafts the grammar allows, one after the other. The state stays as it is."""
        count = self._matcher.try_consume_tokens(list(drafts))
        self.rollback(count)
        return count

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take over accepted tokens. Raises `RunError` if the grammar does not allow them, `UsageError` where it is
        beyond llguidance's limits."""
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            said = _reason(self._matcher)
            if NOT_ALLOWED in said or not self._matcher.is_error():
                raise RunError(f"the grammar does not allow the token ({said})", where="grammar")
            raise self._too_complex()

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        if count and not self._matcher.rollback(count):
            raise RunError(f"cannot go back {count} tokens: {self._matcher.get_error()}", where="grammar")

    def _too_complex(self) -> UsageError:
        return UsageError(f"the schema or expression is too complex ({_reason(self._matcher)})", where="grammar")

    def _mask(self, vocab_size: int) -> torch.Tensor:
        import torch

        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise self._too_complex()
        bits = np.unpackbits(packed, bitorder="little", count=min(vocab_size, 8 * len(packed)))
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[: len(bits)] = torch.from_numpy(bits).bool()
        return mask


def _reason(matcher: Any) -> str:
    """What llguidance says, without the dump of its state."""
    said = (matcher.get_error() or "").partition("<state>")[0].split("\n")[0].strip()
    return said or "nothing is left to say"
