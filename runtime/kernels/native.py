"""ctypes signatures of the native library, and the structures it shares with Python."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

import torch

from . import build

P = ctypes.c_void_p
I = ctypes.c_int  # noqa: E741
I64 = ctypes.c_int64
F = ctypes.c_float

WEIGHT_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
ACTIVATION_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
SCALE_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3, torch.uint8: 4}
"""Element types of a KV cache; the last three are int8, fp8_e4m3 and int4 codes (`runtime/kernels/kv_format.py`)."""
PARTS = ("norm and pack", "qkv", "rope and cache write", "attention", "output projection", "gate/up", "down", "head")


class LayerSpec(ctypes.Structure):
    """Mirror of `LayerSpec` in decoder.h."""

    _fields_ = (
        *((name, P) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, P) for name in ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")),
        *((name, P) for name in ("q_norm", "k_norm", "sinks", "activation_table")),
        *((name, ctypes.c_int32) for name in ("qk_norm_full", "window", "kept", "rope", "activation")),
        *((name, F) for name in ("attention_scale", "attention_cap", "residual_scale")),
    )


class DecoderSpec(ctypes.Structure):
    """Mirror of `DecoderSpec` in decoder.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, ctypes.c_int32) for name in ("embedding_bf16", "rounding", "torch_attention", "reserved")),
        *((name, P) for name in ("embedding", "final_norm", "head")),
        *((name, F) for name in ("embedding_scale", "norm_eps", "logit_scale", "logit_cap")),
    )


class StepArgs(ctypes.Structure):
    """Mirror of `StepArgs` in decoder.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "sequences", "table_stride", "logit_count")),
        *(
            (name, P)
            for name in (
                "token_ids",
                "positions",
                "slots",
                "starts",
                "lengths",
                "tables",
                "logit_rows",
                "logits",
                "layers",
            )
        ),
        *((name, ctypes.c_int32) for name in ("layer_count", "reserved")),
    )


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "llmopt_set_threads": (None, [I]),
    "llmopt_get_threads": (I, []),
    "llmopt_stop_threads": (None, []),
    "llmopt_isa": (I, []),
    "llmopt_linear_create": (P, [I, I, I, I, I, I, I, I]),
    "llmopt_linear_free": (None, [P]),
    "llmopt_linear_bytes": (I64, [P]),
    "llmopt_linear_pack_codes": (None, [P, I, I, P, P, P]),
    "llmopt_linear_pack_values": (None, [P, I, I, P, I]),
    "llmopt_linear_set_bias": (None, [P, P]),
    "llmopt_linear_set_order": (None, [P, P]),
    "llmopt_linear_set_chunks": (None, [P, I, I]),
    "llmopt_linear_forward": (I, [P, I, P, I64, P, I64]),
    "llmopt_write_kv": (I, [I, I, I, I, I, P, P, I, P, P, P]),
    "llmopt_write_keys": (I, [I, I, I, I, I, P, P, I, P, P, P, I, P]),
    "llmopt_advise_huge": (None, [P, I64]),
    "llmopt_attention": (I, [I, I, I, I, I, P, P, I, P, P, I, P, P, P, I, F, F, I, I, P, I, P]),
    "llmopt_outer_products": (I, [I, I, P, I64, P]),
    "llmopt_round_columns": (I, [I, I64, P, P, I64, P, P, P, P, F, P, P]),
    "llmopt_decoder_create": (P, [P, P]),
    "llmopt_decoder_free": (None, [P]),
    "llmopt_decoder_set_rope": (None, [P, I, P, P, I, I]),
    "llmopt_decoder_set_window": (None, [P, I, I, I]),
    "llmopt_decoder_set_cache": (None, [P, I, I, I, I, I, P, P]),
    "llmopt_decoder_step": (I, [P, P]),
    "llmopt_decoder_profile": (None, [P, I, P]),
}


@lru_cache(maxsize=2)
def _library(isa: str) -> ctypes.CDLL:
    lib = build._load(isa)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    lib.llmopt_set_threads(int(os.environ.get("LLMOPT_NUM_THREADS", 0)) or torch.get_num_threads())
    return lib


def library() -> ctypes.CDLL:
    """The library with its signatures set, compiled at first use. Raises `build.NativeUnavailable` with the reason."""
    return _library(build.requested_isa())


def instruction_set() -> str:
    """Which code paths the library was compiled with: `avx512-vnni-bf16`, `avx512-vnni` or `portable`."""
    return {3: "avx512-vnni", 2: "avx512-vnni-bf16", 1: "portable"}[library().llmopt_isa()]


def set_num_threads(threads: int) -> None:
    """Threads that native calls use from now on, the caller's included. Default: `$LLMOPT_NUM_THREADS`, else
    torch's."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    library().llmopt_set_threads(threads)


def get_num_threads() -> int:
    """Threads that native calls use."""
    return library().llmopt_get_threads()


def stop_threads() -> None:
    """Ends the worker threads; the next native call starts them again."""
    library().llmopt_stop_threads()


def contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` on the CPU, detached, contiguous, in `dtype`; itself where it already is."""
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous()
