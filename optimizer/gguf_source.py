"""Converts a GGUF file to a Hugging Face folder once, in the cache, through transformers' own GGUF reader."""

from __future__ import annotations

import io
import logging
import os
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from ..runtime.open import quiet_transformers
from .errors import MissingDependency, RunError
from .files import fsync_tree, replace_folder, require_space, temporary_sibling

log = logging.getLogger("llmopt")


def check(file: Path) -> None:
    """Raise RunError where the file is not GGUF or ends before its last tensor does."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingDependency("gguf", "gguf", "reading a .gguf file") from None
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise RunError("is not a GGUF file", str(file))
    again = "The file is damaged or cut off; download or copy it again"
    try:
        reader = GGUFReader(file)
    except Exception as error:
        raise RunError(f"cannot be read as GGUF ({type(error).__name__})", str(file), again) from None
    if not reader.tensors:
        raise RunError("has no tensors", str(file), again)
    end = max(int(t.data_offset) + int(t.n_bytes) for t in reader.tensors)
    if end > size:
        raise RunError(f"has {size:,} bytes where its header promises {end:,}", str(file), again)


def convert(file: Path, folder: Path) -> Path:
    """The dequantized model of a GGUF file as a bfloat16 folder; made at the first call, found at later ones.

    The folder is written beside its place and renamed, so that it is whole or absent.
    """
    if (folder / "config.json").exists():
        return folder
    check(file)
    require_space(folder, 5 * file.stat().st_size, "Converting the GGUF file")
    temporary = temporary_sibling(folder)
    try:
        log.warning("Converting %s to a Hugging Face folder in the cache; this happens once.", file.name)
        with quiet_transformers(), redirect_stderr(io.StringIO()):  # its bars ignore transformers' own switch
            _convert(file, temporary)
        fsync_tree(temporary)
        replace_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _convert(file: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, name = str(file.parent), file.name
    options = {}
    try:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass  # releases before GgufConfig always dequantize
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
        model: Any = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.bfloat16, **options)
    except Exception as error:
        what = f"transformers cannot load this GGUF model: {type(error).__name__}: {error}"
        raise RunError(what, str(file), "Give a Hugging Face folder instead") from None
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except OSError as error:
        raise RunError(f"cannot be written: {os.strerror(error.errno or 0)}", str(out)) from None
