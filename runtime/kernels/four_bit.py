"""Linear layers with four-bit codes of a table and a scale a block, as bitsandbytes stores them: NF4, and FP4 to read.

NF4 (Dettmers et al. 2023, QLoRA, arXiv:2305.14314) has the 16 values of `NF4`, quantiles of a normal distribution. A
block is 64 weights in row-major order, over the ends of rows, and its scale their largest magnitude. With double
quantization the scales are themselves stored in eight bits, see `dynamic8.py`. The state dict is the module's part of
a checkpoint of transformers and bitsandbytes; some keys have points in them:

    weight                   uint8 [ceil(N K / 2), 1]    two codes a byte, the even one in the high half
    weight.absmax            uint8 [B], or float32 [B]   scales of the B = ceil(N K / 64) blocks, the latter plain
    weight.quant_map         float32 [16]                the table
    weight.nested_absmax     float32 [ceil(B / 256)]     of double quantization: scales of the scales,
    weight.nested_quant_map  float32 [256]               and their table
    weight.quant_state.bitsandbytes__nf4   uint8 [*]     JSON: shape, dtype, block sizes, and the scales' mean
    bias                     model dtype [N]             where the layer has one
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .dynamic8 import BLOCK, compress, expand
from .packed import QuantScheme, WeightHolder, fixed

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of the codes 0 to 15 (QLoRA, appendix E)."""
BLOCK_SIZE = 64
STATE_BYTES = 256
"""Length to which the JSON is filled up with spaces, so that it is known before the mean is."""
ABSMAX, TABLE, NESTED_ABSMAX, NESTED_TABLE, STATE = (
    "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__",
)  # fmt: skip


@dataclass(frozen=True)
class FourBitScheme(QuantScheme):
    """Codes of a table of 16 in blocks of `group_size`.

    kind: `nf4`, or `fp4` (read only); nested: scales in eight bits; compute_dtype: torch's name of the type that inputs
    are converted to, empty for their own; state_bytes: length of the JSON. Raises ValueError for another kind.
    """

    bits: int = 4
    group_size: int = BLOCK_SIZE
    kind: str = "nf4"
    nested: bool = True
    compute_dtype: str = ""
    state_bytes: int = STATE_BYTES
    spans_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.kind not in ("nf4", "fp4") or self.bits != 4 or not self.symmetric or self.g_idx:
            raise ValueError(f"no scheme {self.kind} of {self.bits} bits")

    @property
    def format(self) -> str:
        return f"bitsandbytes-{self.kind}"

    def num_blocks(self, out_features: int, in_features: int) -> int:
        """Scales of the whole weight."""
        return -(-out_features * in_features // self.group_size)

    def nbytes(self, out_features: int, in_features: int, dtype_bytes: int) -> int:
        blocks = self.num_blocks(out_features, in_features)
        size = (out_features * in_features + 1) // 2 + 16 * 4 + self.state_bytes
        return size + (blocks + -(-blocks // BLOCK) * 4 + 256 * 4 if self.nested else blocks * 4)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 below 16, any shape, as uint8 [ceil(numel / 2), 1], the even one in the high half."""
    flat = codes.reshape(-1)
    if flat.numel() % 2:
        flat = nn.functional.pad(flat, (0, 1), value=NF4.index(0.0))
    return (flat[::2] << 4 | flat[1::2]).unsqueeze(1)


def pair_values(table: torch.Tensor) -> torch.Tensor:
    """The two values of every byte, float32 [256, 2], for a table float32 [16]."""
    return torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)


class FourBitLinear(WeightHolder):
    """`y = x W^T + b`, W dequantized at each call. Make one with `from_linear`, or with `empty` to load into."""

    scheme: FourBitScheme

    def __init__(self, in_features: int, out_features: int, scheme: QuantScheme) -> None:
        if not isinstance(scheme, FourBitScheme):
            raise ValueError(f"{type(self).__name__} holds no weight of the scheme {scheme}")
        super().__init__(in_features, out_features, scheme)
        self._offset: tuple[torch.Tensor, float] | None = None

    def allocate(self, new: Callable[..., nn.Parameter], dtype: torch.dtype) -> None:
        own = self.scheme
        blocks = own.num_blocks(self.out_features, self.in_features)
        self._parameters["weight"] = new((self.out_features * self.in_features + 1) // 2, 1, dtype=torch.uint8)
        self._parameters[ABSMAX] = new(blocks, dtype=torch.uint8 if own.nested else torch.float32)
        self._parameters[TABLE] = new(16, dtype=torch.float32)
        if own.nested:
            self._parameters[NESTED_ABSMAX] = new(-(-blocks // BLOCK), dtype=torch.float32)
            self._parameters[NESTED_TABLE] = new(256, dtype=torch.float32)
        self._parameters[STATE + own.kind] = new(own.state_bytes, dtype=torch.uint8)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        scheme: QuantScheme,
    ) -> FourBitLinear:
        """From NF4 codes uint8 [N, K] and the blocks' scales float32 [B], which are stored in eight bits.

        The linear gives its shape, its dtype and its bias. Raises ValueError where shapes or scheme do not fit.
        """
        layer = cls(linear.in_features, linear.out_features, scheme)
        own, shape = layer.scheme, (linear.out_features, linear.in_features)
        blocks = own.num_blocks(*shape)
        if (own.kind, own.nested) != ("nf4", True) or zeros is not None:
            raise ValueError(f"only NF4 with double quantization is written, not {own}")
        if tuple(codes.shape) != shape or tuple(scales.shape) != (blocks,):
            raise ValueError(
                f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not fit {list(shape)}, {blocks} blocks"
            )
        found = compress(scales)
        state = {
            "quant_type": own.kind,
            "blocksize": own.group_size,
            "dtype": str(linear.weight.dtype).removeprefix("torch."),
            "shape": list(shape),
            "nested_blocksize": BLOCK,
            "nested_dtype": "float32",
            "nested_offset": found.offset,
        }
        text = torch.tensor(list(json.dumps(state).encode().ljust(own.state_bytes)), dtype=torch.uint8)
        parts = {
            "weight": pack_pairs(codes),
            ABSMAX: found.codes,
            TABLE: torch.tensor(NF4, device=codes.device),
            NESTED_ABSMAX: found.largest,
            NESTED_TABLE: found.table,
            STATE + own.kind: text.to(codes.device),
        }
        layer._parameters.update({name: fixed(part) for name, part in parts.items()})
        layer.keep_bias(linear)
        layer.prepare()
        return layer

    def part(self, name: str) -> torch.Tensor:
        """The tensor of that name in the state dict."""
        found = self._parameters[name]
        assert found is not None
        return found

    def state(self) -> dict[str, Any]:
        """The JSON. Raises ValueError where it is none."""
        found = json.loads(bytes(self.part(STATE + self.scheme.kind).tolist()))
        if not isinstance(found, dict):
            raise ValueError("the quant_state is no table")
        return found

    def prepare(self) -> float:
        """The scales' mean, which the JSON has; it is read once for each tensor that holds it."""
        stored = self.part(STATE + self.scheme.kind)
        if self._offset is None or self._offset[0] is not stored:
            self._offset = (stored, float(self.state()["nested_offset"]) if self.scheme.nested else 0.0)
        return self._offset[1]

    def group_scales(self) -> torch.Tensor:
        """The blocks' scales, float32 [B]."""
        stored = self.part(ABSMAX)
        if not self.scheme.nested:
            return stored.detach()
        return expand(stored, self.part(NESTED_ABSMAX), self.part(NESTED_TABLE), self.prepare())

    def dequantize(self) -> torch.Tensor:
        """The weight's values, float32 [N, K]."""
        count, size = self.out_features * self.in_features, self.scheme.group_size
        pairs = pair_values(self.part(TABLE))
        values = nn.functional.embedding(self.part("weight").view(-1).int(), pairs).view(-1)
        short = self.scheme.num_blocks(self.out_features, self.in_features) * size - values.numel()
        if short > 0:
            values = nn.functional.pad(values, (0, short))
        values = values[: values.numel() // size * size].view(-1, size) * self.group_scales().unsqueeze(1)
        return values.view(-1)[:count].view(self.out_features, self.in_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self.scheme.compute_dtype
        dtype = getattr(torch, own) if own else input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(input.to(dtype), self.dequantize().to(dtype), bias).to(input.dtype)

    def describe(self) -> str:
        return f"{self.scheme.kind}, blocks of {self.scheme.group_size}{', nested' if self.scheme.nested else ''}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As torch does, which knows no parameters whose names have points."""
        parts = {name: part for name, part in self._parameters.items() if "." in name and part is not None}
        for name, part in parts.items():
            given = state_dict.get(f"{prefix}{name}")
            if given is None:
                missing_keys.append(f"{prefix}{name}")
            elif given.shape != part.shape:
                error_msgs.append(f"{prefix}{name} has shape {tuple(given.shape)}, not {tuple(part.shape)}")
            elif local_metadata.get("assign_to_params_buffers"):
                self._parameters[name] = fixed(given.detach())
            else:
                part.data.copy_(given)
        rest = {key: tensor for key, tensor in state_dict.items() if key.removeprefix(prefix) not in parts}
        kept = dict(self._parameters)
        self._parameters = {name: part for name, part in kept.items() if name not in parts}
        try:
            super()._load_from_state_dict(
                rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            self._parameters = {name: self._parameters.get(name, part) for name, part in kept.items()}
