"""GGUF files side by side in llama.cpp: size, perplexity over one text, decode speed.

    python benchmarks/gguf_export.py --text FILE NAME=FOLDER [NAME=FOLDER …] [--windows 4] [--length 256] [--json OUT]
        [--library libllama.so --rounded FOLDER --types Q8_0 Q4_0]

Each FOLDER was written by `llmopt export … --format gguf`. With --library, llama.cpp rounds the F16, BF16 or F32 file
of the folder --rounded itself, by the function that llama-quantize calls (llama_model_quantize), to each of the types:
once as that program does it, and once with the embedding in BF16, as `llmopt export` leaves it with type=auto.

Perplexity is exp of the mean negative log-probability that llama-server gives the tokens of each window but the first,
windows one after another from the start of the text, each by itself. Speed is the median of three greedy continuations.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = 64
FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
"""llama_ftype."""
BF16 = 30
"""ggml_type."""


class QuantizeParams(ctypes.Structure):
    """The first fields of llama_model_quantize_params, and room for what follows them."""

    _fields_ = (
        ("num_threads", ctypes.c_int32),
        ("file_type", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("embedding_type", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 240),
    )


def round_by_llama(library: Path, folder: Path, kind: str, plain_embedding: bool, out: Path) -> Path:
    """A copy of a folder with its file rounded by llama.cpp. library: libllama.so."""
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and file.name != "llmopt.json":
            shutil.copy2(file, out / file.name)
    llama = ctypes.CDLL(str(library.resolve()))
    llama.llama_model_quantize_default_params.restype = QuantizeParams
    llama.llama_model_quantize.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(QuantizeParams))
    llama.llama_model_quantize.restype = ctypes.c_uint32
    llama.llama_backend_init()
    params = llama.llama_model_quantize_default_params()
    params.num_threads, params.file_type = 1, FILE_TYPES[kind]
    if plain_embedding:
        params.embedding_type = BF16
    source, target = (str(path / "model.gguf").encode() for path in (folder, out))
    if llama.llama_model_quantize(source, target, ctypes.byref(params)):
        sys.exit(f"llama.cpp does not round {folder} to {kind}")
    return out


def measure(folder: Path, text: str, windows: int, length: int, threads: int) -> dict[str, Any]:
    """One row."""
    import llmopt

    with llmopt.load(folder, engine="llamacpp", num_threads=threads, max_num_seqs=1) as llm:
        ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        parts = [ids[i * length : (i + 1) * length] for i in range(windows)]
        began = time.perf_counter()
        scores: list[Any] = [llm.score(part) for part in parts]
        values = [v for score in scores for v in score.logprobs if v is not None]
        scoring = time.perf_counter() - began
        llm.generate("Once upon a time", max_new_tokens=8)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            done: Any = llm.generate("Once upon a time", max_new_tokens=NEW_TOKENS, ignore_eos=True)
            seconds.append((time.perf_counter() - began) / done.num_tokens)
        return {
            "bytes": llm.weight_bytes,
            "perplexity": math.exp(-sum(values) / len(values)),
            "scored_tokens": len(values),
            "scoring_seconds": round(scoring, 1),
            "decode_tokens_per_second": 1 / statistics.median(seconds),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--library", type=Path, help="libllama.so, for rows that llama.cpp rounds")
    parser.add_argument("--rounded", type=Path, help="folder whose file it rounds")
    parser.add_argument("--types", nargs="*", choices=FILE_TYPES, default=["Q8_0", "Q4_0"])
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    rows: dict[str, Any] = {}
    print(f"{'':32}{'MB':>8}{'perplexity':>12}{'tok/s':>8}")

    def add(name: str, folder: Path) -> None:
        row = rows[name] = measure(folder, text, options.windows, options.length, options.threads)
        speed = row["decode_tokens_per_second"]
        print(f"{name:32}{row['bytes'] / 1e6:8.1f}{row['perplexity']:12.3f}{speed:8.1f}", flush=True)

    for item in options.folders:
        name, _, folder = item.partition("=")
        add(name, Path(folder))
    if options.library:
        for kind in options.types:
            for plain in (False, True):
                with tempfile.TemporaryDirectory() as out:
                    made = round_by_llama(options.library, options.rounded, kind, plain, Path(out))
                    add(f"llama.cpp {kind}{', BF16 embedding' if plain else ''}", made)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
