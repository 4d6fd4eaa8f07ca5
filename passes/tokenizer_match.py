"""Whether two tokenizers are the same, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = (
    "The quick brown fox — 1,234.5 km!\n\tdef f(x): return {'é': [x**2, \"日本\"]}  # 😀 and  two  spaces\r\n",
    "I'll it's WE'RE http://example.org/a_b?c=d&e=1e-5",
    "<s></s><|im_start|>user\n<|endoftext|>[INST]",
)
"""Texts whose encodings tell apart tokenizers of one vocabulary (merges, normalization, special tokens)."""


def first_mismatch(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """None where the tokenizers agree, else a clause that names the first token in which they differ.

    Compared are the vocabularies (id → token), the special tokens, and the encodings of PROBES.
    """
    mine, its = ({i: t for t, i in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    for index in sorted(mine.keys() | its.keys()):
        if mine.get(index) != its.get(index):
            return (
                f"token {index} is {_shown(mine.get(index))} in the model's tokenizer and "
                f"{_shown(its.get(index))} in the draft's"
            )
    for kind in ("bos_token", "eos_token", "unk_token"):
        a, b = getattr(target, kind, None), getattr(draft, kind, None)
        if a != b:
            return f"{kind} is {_shown(a)} in the model's tokenizer and {_shown(b)} in the draft's"
    for token in sorted(set(map(str, target.all_special_tokens)) ^ set(map(str, draft.all_special_tokens))):
        return f"{token!r} is a special token in only one of the two tokenizers"
    for text in PROBES:
        a, b = (list(t(text, verbose=False)["input_ids"]) for t in (target, draft))
        if a != b:
            at = next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))
            shown = [_shown(names[i[at]]) if at < len(i) else "nothing" for names, i in ((mine, a), (its, b))]
            return f"token {at} of {text[:24]!r}… is {shown[0]} for the model and {shown[1]} for the draft"
    return None


def _shown(token: str | None) -> str:
    return "absent" if token is None else repr(token)
