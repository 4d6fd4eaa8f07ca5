"""A tokenizer as GGUF metadata: `tokenizer.ggml.*` and the chat template.

llama.cpp has two kinds that the architectures here use: `gpt2`, byte-level BPE with its merges, and `llama`, the BPE of
SentencePiece, which merges the pair whose joined piece has the best score. transformers stores the latter as merges
too; a piece's score is then minus the rank of the first merge that makes it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import UsageError
from .pretokenizers import recognize

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import GenerationConfig, PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's token types."""
SPACE = "▁"
HEX = re.compile(r"<0x[0-9A-F]{2}>")
SPECIAL = ("bos", "eos", "unk", "pad", "sep", "mask")


def add_tokenizer(
    writer: GGUFWriter,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    vocab_size: int,
    pre_tokenizer: str = "auto",
) -> dict[str, Any]:
    """Write the tokenizer; returns its `model`, `pre` and number of `tokens` for the manifest.

    vocab_size: rows of the embedding; ids without a token become unused ones. pre_tokenizer: llama.cpp's name for it,
    `auto` to recognize it. Raises UsageError for a tokenizer that llama.cpp does not have.
    """
    backend = backend_state(tokenizer)
    spm = bool(backend["model"].get("byte_fallback"))
    model, pre = ("llama", "default") if spm else ("gpt2", pre_tokenizer)
    if pre == "auto":
        pre = recognize(backend)
    texts, types = vocabulary(backend, vocab_size, spm)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in backend["model"]["merges"]]
    if spm:
        writer.add_token_scores(scores(texts, backend["model"]["merges"]))
        writer.add_add_space_prefix(adds_space(tokenizer))
    writer.add_token_types(types)
    if not spm:
        writer.add_token_merges(merges)
    _add_special(writer, tokenizer, generation)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    return {"model": model, "pre": pre, "tokens": len(texts)}


def backend_state(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The state of the `tokenizers` library's tokenizer. Raises UsageError where it is none, or no BPE."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError(f"{type(tokenizer).__name__} is written in Python, and has no state to export", "gguf")
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "BPE":
        raise UsageError(f"a tokenizer of kind {state['model']['type']} is not exported as GGUF", "gguf")
    normalizer = state.get("normalizer") or {"type": "NFC"}
    if not state["model"].get("byte_fallback") and normalizer["type"] != "NFC":
        raise UsageError(f"llama.cpp does not normalize text by {normalizer['type']}", "gguf")
    return state


def vocabulary(backend: dict[str, Any], size: int, spm: bool) -> tuple[list[str], list[int]]:
    """Text and type of every token id below `size`. Raises UsageError for an id beyond."""
    texts = [f"[PAD{i}]" for i in range(size)]
    types = [UNUSED] * size
    for text, i in backend["model"]["vocab"].items():
        _require_row(i, size, text)
        texts[i], types[i] = text, BYTE if spm and HEX.fullmatch(text) else NORMAL
    for token in backend["added_tokens"]:
        i, text = token["id"], token["content"]
        _require_row(i, size, text)
        texts[i], types[i] = text, CONTROL if token["special"] else USER_DEFINED
        if not token["special"]:
            texts[i] = text.replace(SPACE, " ")
    unknown = backend["model"].get("unk_token")
    if spm and unknown in backend["model"]["vocab"]:
        types[backend["model"]["vocab"][unknown]] = UNKNOWN
    return texts, types


def scores(texts: list[str], merges: list[Any]) -> list[float]:
    """Of each piece, minus the rank of the first merge that makes it; pieces that none makes stand below all others."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        ranks.setdefault(left + right, rank)
    return [float(-ranks.get(text, len(merges) + i)) for i, text in enumerate(texts)]


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text's first word gets a space in front."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return str(tokenizer.convert_ids_to_tokens(ids)[0]).startswith(SPACE)


def _require_row(i: int, size: int, text: str) -> None:
    if i >= size:
        raise UsageError(f"the token {text!r} has the id {i}, and the embedding has {size} rows", "gguf")


def _add_special(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig) -> None:
    ends = generation.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in SPECIAL}
    if ids["eos"] is None and ends:
        ids["eos"] = ends[0]
    for name, i in ids.items():
        if i is not None:
            getattr(writer, f"add_{name}_token_id")(i)
    others = [i for i in ends if i != ids["eos"]]
    if others:
        writer.add_eot_token_id(others[0])
    found = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(ids["bos"] is not None and found[0] == ids["bos"])
    writer.add_add_eos_token(ids["eos"] is not None and found[-1] == ids["eos"])
