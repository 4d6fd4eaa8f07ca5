"""The fused decoder: one native call runs every layer of a Llama-like model over a flat batch of tokens."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from .attention import allocate_kv, matches_torch
from .linear import NativeLinear, order_of_groups, quantize_rows
from .native import CACHE_FORMATS, PARTS, DecoderSpec, LayerSpec, StepArgs, contiguous, library, set_num_threads
from .proof import Proof, check, expected_logits
from .recognize import ACTIVATIONS, LinearPart, ModelStructure, UnsupportedModel, recognize, rope_table

if TYPE_CHECKING:
    import numpy as np

_ERRORS = {
    -2: "a token id lies outside the vocabulary",
    -3: "a position lies outside the rope table",
    -4: "a slot lies outside the KV cache",
    -5: "a block lies outside the KV cache, or a block table is too short for its sequence",
    -6: "a logit row lies outside the batch",
    -7: "starts must begin with 0, end with the number of tokens, and every length must include its tokens",
    -8: "no KV cache: call allocate_kv first",
    -9: "layers must ascend and lie within the model",
}
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "q_norm", "k_norm", "sinks")
ROPE_START = 4096
HEAD_GROUP = 32

Integers: TypeAlias = "torch.Tensor | np.ndarray | Sequence[int]"
StepArrays: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
"""The first seven arguments of `FusedDecoder.forward`."""


@dataclass(frozen=True)
class DecoderOptions:
    """How weights and activations are held.

    activation: `none` (activations enter the products in the model's own dtype) or `int8` (quantized at run time, each
        token and weight group by itself, wherever the weight is integer).
    weights: `stored` (packed modules as they are, float weights as they are), `bfloat16`, or `int8` (float weights are
        quantized at load, symmetric, one scale a row; packed modules stay as they are).
    lm_head: `stored`, `int8` (one scale a row) or `int4` (symmetric, groups of 32), quantized at load.
    rounding: `model` rounds to bfloat16 wherever the modules of a bfloat16 model hand on a tensor, so that greedy text
        is that of the modules themselves; `none` keeps float32 between the products, which is nearer to the float32
        model; `auto` is `model` where everything else is as the model has it, else `none`.
    """

    activation: str = "none"
    weights: str = "stored"
    lm_head: str = "stored"
    rounding: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (
            ("activation", ("none", "int8")),
            ("weights", ("stored", "bfloat16", "int8")),
            ("lm_head", ("stored", "int8", "int4")),
            ("rounding", ("auto", "model", "none")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")

    @property
    def as_stored(self) -> bool:
        """Whether every product has the model's own weights and activations."""
        return (self.activation, self.weights, self.lm_head) == ("none", "stored", "stored")

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether a model held in `dtype` is run with its own roundings."""
        return dtype == torch.bfloat16 and (self.rounding == "model" or (self.rounding == "auto" and self.as_stored))


def _native_linear(part: LinearPart, how: str, options: DecoderOptions, dtype: torch.dtype) -> NativeLinear:
    """Packs one part. how: `stored`, `bfloat16`, `int8` or `int4`."""
    module: Any = part.module  # nn.Linear, or a packed layer with `quant_state`
    rows = slice(part.first, part.first + (part.rows or module.out_features))
    bias = getattr(module, "bias", None)
    bias = None if bias is None else bias[rows]
    quantized = options.activation == "int8" or getattr(module, "activation", None) == "int8"
    activation = "int8" if quantized else "bfloat16" if dtype == torch.bfloat16 else "float32"
    if hasattr(module, "quant_state"):
        state = module.quant_state()
        codes, scales, zeros = state.codes[rows], state.scales[rows], state.zeros
        g_idx = getattr(state, "g_idx", None)
        zeros = None if zeros is None else zeros[rows]
        bits = 4 if state.bits <= 4 else 8
        if bits != state.bits and zeros is None:  # 2, 3 and 5 to 7 bits travel in the next larger format
            zeros = torch.full(scales.shape, 2 ** (state.bits - 1), dtype=torch.uint8)
        dequantize = options.rounds(dtype)
        try:
            order = None if g_idx is None else order_of_groups(g_idx, state.group_size)
            layer = NativeLinear.from_codes(
                codes if order is None else codes[:, order], scales, zeros, bits=bits, bias=bias, activation=activation,
                dequantize=dequantize,
            )  # fmt: skip
        except ValueError as error:  # groups that the kernels do not have
            raise UnsupportedModel(f"{part.name}: {error}") from None
        return layer if order is None else layer.reorder_inputs(order)
    weight = module.weight.detach()[rows]
    if how in ("int8", "int4"):
        group = HEAD_GROUP if how == "int4" and weight.shape[1] % HEAD_GROUP == 0 else 0
        codes, scales, zeros = quantize_rows(weight, bits=int(how[3:]), group_size=group)
        return NativeLinear.from_codes(codes, scales, zeros, bits=int(how[3:]), bias=bias, activation=activation)
    return NativeLinear.from_weight(weight, bias, dtype="bfloat16" if how == "bfloat16" else None)


class FusedDecoder:
    """A model whose step is one native call. Make one with `build_decoder`.

    One owner at a time: calls from several threads are serialized, but they share one KV cache. The embedding table is
    used where it lies in the model; everything else is a packed copy.
    """

    def __init__(self, structure: ModelStructure, options: DecoderOptions, *, release: bool = False) -> None:
        self.options, self.structure = options, structure
        self.rounds = options.rounds(structure.dtype)
        self.vocab_size = structure.vocab
        self.num_layers, self.num_kv_heads, self.head_dim = (
            len(structure.layers),
            structure.kv_heads,
            structure.head_dim,
        )
        self._keep: list[Any] = []
        self._tables: dict[str, torch.Tensor] = {}
        self._handle: int | None = None
        self.linear_formats: dict[str, int] = {}
        """Number of linears by format, as `int4/int8` (weight/activation)."""
        self.weight_bytes = 0
        self._ropes = sorted({layer.rope for layer in structure.layers if layer.rope is not None})
        self._rope_length = 0
        specs = (LayerSpec * self.num_layers)()
        for spec, layer in zip(specs, structure.layers):
            self._fill(spec, layer, release)
        head = self._pack(structure.head, options.lm_head, options, structure.dtype)
        self.head_bytes = head.nbytes
        embedding = contiguous(structure.embedding, structure.embedding.dtype)
        self.embedding_bytes = embedding.nbytes
        self._keep += [embedding, structure.final_norm]
        spec = DecoderSpec(
            self.num_layers, structure.hidden, structure.heads, structure.kv_heads, structure.head_dim, structure.vocab,
            int(embedding.dtype == torch.bfloat16), structure.norm_roundings if self.rounds else 0,
            int(self.rounds and matches_torch()), 0,
            embedding.data_ptr(), structure.final_norm.data_ptr(), head.handle,
            structure.embedding_scale, structure.norm_eps, structure.logit_scale, structure.logit_cap,
        )  # fmt: skip
        self._handle = library().llmopt_decoder_create(ctypes.byref(spec), specs)
        if not self._handle:
            raise MemoryError("no memory for the fused decoder")
        self._grow_rope(ROPE_START)
        self._cache: tuple[torch.Tensor, torch.Tensor] | None = None
        self.proof: Proof | None = None

    def _pack(self, part: LinearPart, how: str, options: DecoderOptions, dtype: torch.dtype) -> NativeLinear:
        linear = _native_linear(part, how, options, dtype)
        if self.rounds:
            linear.sum_as_torch()
        self._keep.append(linear)
        self.weight_bytes += linear.nbytes
        key = f"{linear.weight_format}/{linear.activation_format}"
        self.linear_formats[key] = self.linear_formats.get(key, 0) + 1
        return linear

    def _fill(self, spec: LayerSpec, layer: Any, release: bool) -> None:
        structure = self.structure
        for name in LINEARS:
            setattr(
                spec, name, self._pack(getattr(layer, name), self.options.weights, self.options, structure.dtype).handle
            )
        if release:
            for name in LINEARS:
                _release(getattr(layer, name).module)
        for name in NORMS:
            tensor = getattr(layer, name)
            if tensor is not None:
                tensor = contiguous(tensor, torch.float32)
                self._keep.append(tensor)
                setattr(spec, name, tensor.data_ptr())
        spec.qk_norm_full = int(layer.q_norm is not None and layer.q_norm.numel() != structure.head_dim)
        spec.window = layer.window
        spec.rope = -1 if layer.rope is None else self._ropes.index(layer.rope)
        spec.activation, function = ACTIVATIONS[layer.activation]
        if self.rounds:
            spec.activation_table = self._activation_table(layer.activation, function).data_ptr()
        spec.attention_scale, spec.attention_cap = layer.attention_scale, layer.attention_cap
        spec.residual_scale = layer.residual_scale

    def _activation_table(self, name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """torch's own values of an activation, bfloat16 [65536] by the bits of its argument."""
        if name not in self._tables:
            bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).roll(2**15)
            self._tables[name] = function(bits.view(torch.bfloat16)).contiguous()
        return self._tables[name]

    def _grow_rope(self, length: int) -> None:
        tables = [rope_table(self.structure.rotary, kind, length) for kind in self._ropes]
        if self.rounds:
            tables = [(cos.bfloat16().float(), sin.bfloat16().float()) for cos, sin in tables]
        for index, (cos, sin) in enumerate(tables):
            library().llmopt_decoder_set_rope(self._handle, index, cos.data_ptr(), sin.data_ptr(), *cos.shape)
        self._rope_tables, self._rope_length = tables, length

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Allocates the paged KV cache of all layers (see `attention.allocate_kv`), replacing an earlier one; returns
        its
        bytes. block_size: a multiple of 32. dtype: a key of `native.CACHE_FORMATS`. Raises ValueError for others."""
        self._cache = allocate_kv(num_blocks, block_size, self.num_kv_heads, self.head_dim, dtype, self.num_layers)
        self.num_blocks, self.block_size = num_blocks, block_size
        library().llmopt_decoder_set_cache(
            self._handle, CACHE_FORMATS[dtype], num_blocks, block_size, self.num_kv_heads, self.head_dim,
            self._cache[0].data_ptr(), self._cache[1].data_ptr(),
        )  # fmt: skip
        return self._cache[0].nbytes + self._cache[1].nbytes

    def set_window(self, layer: int, window: int, kept: int) -> None:
        """From the next step on a token of this layer sees the last `window` positions, its own included, and the first
        `kept` ones; window 0: all. Raises ValueError for a layer that is not there or a negative number."""
        if not 0 <= layer < self.num_layers or window < 0 or kept < 0:
            raise ValueError(f"layer {layer} of {self.num_layers}, window {window}, {kept} kept positions")
        library().llmopt_decoder_set_window(self._handle, layer, window, kept)

    def drop_kv(self) -> None:
        """Frees the KV cache; steps are refused until the next `allocate_kv`."""
        library().llmopt_decoder_set_cache(self._handle, 0, 0, 32, self.num_kv_heads, self.head_dim, None, None)
        self._cache = None

    @property
    def kv_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all layers; blocks are dimension 1. Raises RuntimeError before `allocate_kv`."""
        if self._cache is None:
            raise RuntimeError(_ERRORS[-8])
        return self._cache

    def forward(
        self,
        token_ids: Integers,
        positions: Integers,
        slots: Integers,
        starts: Integers,
        lengths: Integers,
        block_tables: torch.Tensor | np.ndarray | Sequence[Sequence[int]],
        logit_rows: Integers,
        out: torch.Tensor | None = None,
        layers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step over a flat batch; integer arguments are tensors, arrays or sequences, int32 tensors are used as
        they are.

        token_ids, positions, slots [tokens]: a token's keys and values go to slot block * block_size + offset.
        starts [sequences + 1], lengths [sequences]: sequence r owns tokens starts[r] … starts[r+1]-1, which are the
        last
        of its lengths[r] tokens. block_tables [sequences, max_blocks]. logit_rows [rows]: the tokens whose logits are
        wanted, in order, repeats allowed; may be empty. layers: contiguous int32, ascending: only these run, before the
        head.

        Returns float32 logits [rows, vocab]; `out`, if given, is filled and returned. Raises ValueError where an
        argument
        is out of range, before anything is computed or written, and MemoryError when scratch memory is short.
        """
        ids, at, where, first, total, tables, rows = (
            torch.as_tensor(a, dtype=torch.int32).contiguous()
            for a in (token_ids, positions, slots, starts, lengths, block_tables, logit_rows)
        )
        tokens, sequences = ids.numel(), total.numel()
        if at.numel() != tokens or where.numel() != tokens or first.numel() != sequences + 1:
            raise ValueError(f"{tokens} tokens, {at.numel()} positions, {where.numel()} slots, {first.numel()} starts")
        if tables.dim() != 2 or tables.shape[0] != sequences:
            raise ValueError(f"block_tables {tuple(tables.shape)} for {sequences} sequences")
        shape = (rows.numel(), self.vocab_size)
        if out is None:
            out = torch.empty(shape)
        elif out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"out must be contiguous float32 {shape}")
        args = StepArgs(
            tokens, sequences, tables.shape[1], rows.numel(), ids.data_ptr(), at.data_ptr(), where.data_ptr(),
            first.data_ptr(), total.data_ptr(), tables.data_ptr(), rows.data_ptr(), out.data_ptr(),
            None if layers is None else layers.data_ptr(), 0 if layers is None else layers.numel(), 0,
        )  # fmt: skip
        code = library().llmopt_decoder_step(self._handle, ctypes.byref(args))
        if code == -3 and int(at.min()) >= 0 and int(at.max()) >= self._rope_length:
            self._grow_rope(max(2 * self._rope_length, int(at.max()) + 1))
            code = library().llmopt_decoder_step(self._handle, ctypes.byref(args))
        if code == -1:
            raise MemoryError("no memory for the step's activations")
        if code:
            raise ValueError(f"the step was refused: {_ERRORS[code]}")
        return out

    def profile(self, enabled: bool) -> dict[str, float]:
        """Seconds by part of the step since the last call; from now on they are counted if `enabled`."""
        values = (ctypes.c_int64 * len(PARTS))()
        library().llmopt_decoder_profile(self._handle, int(enabled), ctypes.addressof(values))
        return {name: value * 1e-9 for name, value in zip(PARTS, values)}

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle and not ending():  # modules are taken apart then, and the memory goes with the process
            library().llmopt_decoder_free(handle)


def _release(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(parameter.new_empty(0), requires_grad=False))


def build_decoder(
    model: nn.Module,
    *,
    activation: str = "none",
    weights: str = "stored",
    lm_head: str = "stored",
    rounding: str = "auto",
    num_threads: int | None = None,
    release: bool = False,
    prove: bool = True,
) -> FusedDecoder:
    """Packs a Hugging Face causal language model (on the CPU, in eval mode) into a fused decoder.

    activation, weights, lm_head, rounding: see DecoderOptions. num_threads: for all native calls of the process; None
    leaves it.
    release: frees each layer's weights in the model as they are packed; the model can then no longer run.
    prove: compares logits with the model's own on a short probe, chunks and single tokens mixed (see proof.py).

    Raises UnsupportedModel where a part is not understood or the proof fails, NativeUnavailable without a compiler.
    """
    options = DecoderOptions(activation, weights, lm_head, rounding)
    library()
    if num_threads is not None:
        set_num_threads(num_threads)
    structure = recognize(model)
    expected = expected_logits(model, structure.vocab) if prove else None
    decoder = FusedDecoder(structure, options, release=release)
    if expected is not None:
        decoder.proof = check(decoder, expected)
    return decoder
