"""The source model's logits on disk, so that a fresh process compares an artifact without holding both models.

The file is a safetensors file, written as a stream: `input_ids` int64 `[windows, length]` and `logits`
`[windows, length - 1, vocab]` in the model's own dtype; the metadata key `llmopt` holds a JSON object.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import RunError
from ..runtime.weight_files import read_header
from .logits import window_logits
from .perplexity import Perplexity, PerplexityMeter

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE = (
    "The quick brown fox — 1,234.5 km!\n\tdef f(x): return {'é': [x**2, \"日本\"]}  # 😀 and  two  spaces\r\n"
    "I'll it's WE'RE http://example.org/a_b?c=d&e=1e-5"
)
"""A text whose encoding tells tokenizers apart."""


def write_reference(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: torch.Tensor,
    path: str | Path,
    metadata: dict[str, Any] | None = None,
    scored: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Perplexity:
    """Write the model's logits over `windows` (int64 `[n, length]`) and return its perplexity there.

    `metadata` (JSON-serializable) is kept in the file beside what this function adds. scored: ids and logits of each
    window from elsewhere, as `window_logits` gives them. A failed write leaves no file.
    Raises RunError where the disk is full.
    """
    path = Path(path)
    meter = PerplexityMeter()
    try:
        with path.open("wb") as file:
            for ids, logits in window_logits(model, windows) if scored is None else scored:
                if meter.num_windows == 0:
                    header = _header(windows, logits, {**(metadata or {}), "probe_ids": probe_ids(tokenizer)})
                    file.write(len(header).to_bytes(8, "little") + header)
                    file.write(windows.contiguous().numpy().tobytes())
                _write_tensor(file, logits)
                meter.update(ids, logits)
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise RunError(
            "no space left on the disk for the reference logits" if full else f"cannot write ({error.strerror})",
            where=str(path),
            what_to_do="Evaluate fewer windows, or point the work folder to another disk." if full else "",
        ) from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return meter.result()


class Reference:
    """A reference file opened for reading; windows are read one at a time.

    Raises RunError where the file is missing, cut short or not a reference.
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        self.path = Path(path)
        header = read_header(self.path)
        if not {"logits", "input_ids"} <= header.keys():
            raise RunError("the file is no reference: it holds no logits and input_ids", where=str(path))
        self._file = safe_open(self.path, framework="pt")
        self.metadata: dict[str, Any] = json.loads((self._file.metadata() or {}).get("llmopt", "{}"))
        self.windows: torch.Tensor = self._file.get_tensor("input_ids")

    def __len__(self) -> int:
        return len(self.windows)

    def logits(self) -> Iterator[torch.Tensor]:
        """Each window's logits, `[length - 1, vocab]` in the source model's dtype, on the CPU."""
        rows = self._file.get_slice("logits")
        for index in range(len(self.windows)):
            yield rows[index]

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise RunError where the tokenizer encodes the probe text otherwise than the source's did."""
        expected, actual = self.metadata.get("probe_ids", []), probe_ids(tokenizer)
        if expected != actual:
            at = next((i for i, (a, b) in enumerate(zip(expected, actual)) if a != b), min(len(expected), len(actual)))
            raise RunError(
                f"the tokenizer is not the source model's: token {at} of the probe text is "
                f"{actual[at] if at < len(actual) else 'absent'}, the source has "
                f"{expected[at] if at < len(expected) else 'none'}",
                where=getattr(tokenizer, "name_or_path", "") or "tokenizer",
            )


def probe_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The encoding of PROBE without special tokens."""
    return list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])


def _header(windows: torch.Tensor, logits: torch.Tensor, metadata: dict[str, Any]) -> bytes:
    names = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
    dtype = names.get(str(logits.dtype))
    if dtype is None:
        raise RunError(f"logits of {logits.dtype} cannot be kept", what_to_do="Load the model in float32 or bfloat16.")
    count, ids_bytes = len(windows), windows.numel() * 8
    shape = [count, *logits.shape]
    end = ids_bytes + count * logits.numel() * logits.element_size()
    header = {
        "__metadata__": {"format": "pt", "llmopt": json.dumps(metadata)},
        "input_ids": {"dtype": "I64", "shape": list(windows.shape), "data_offsets": [0, ids_bytes]},
        "logits": {"dtype": dtype, "shape": shape, "data_offsets": [ids_bytes, end]},
    }
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def _write_tensor(file: Any, tensor: torch.Tensor) -> None:
    import torch

    file.write(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
