"""The paged pool of keys and values.

Layers whose tokens have the same shape form a group with one key and one value tensor, so that a homogeneous model
has exactly two tensors however many layers it has. All layers share one block table: block `b` of a request is block
`b` in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...optimizer.errors import RunError
from ..kernels.kv_format import format_of
from .layer import AttentionLayer

if TYPE_CHECKING:
    import torch


@dataclass
class KVGroup:
    """key: [L, N, B, H, Dk], value: [L, N, B, H, Dv]: L layers, N blocks of B tokens.

    The compiled backend has a layout of its own, with the same two outermost dimensions. The last dimension of a
    quantized pool counts bytes (`kv_format.split`); keys by channel are [L, N, H, bytes] (`kv_format.split_keys`).
    """

    key: torch.Tensor
    value: torch.Tensor


def group_layers(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Give every layer its group (by `cache_shape`, in order of appearance) and its index inside it."""
    shapes: dict[tuple[int, int, int], list[int]] = {}
    placed = []
    for layer in layers:
        members = shapes.setdefault(layer.cache_shape, [])
        placed.append(replace(layer, group=list(shapes).index(layer.cache_shape), index=len(members)))
        members.append(layer.layer_idx)
    return placed


def bytes_per_block(layers: Sequence[AttentionLayer], block_size: int, itemsize: int) -> int:
    """Bytes that one block takes over all layers, `itemsize` bytes an element."""
    return sum(h * (dk + dv) for h, dk, dv in (layer.cache_shape for layer in layers)) * block_size * itemsize


def block_bytes(layers: Sequence[AttentionLayer], block_size: int, dtype: torch.dtype) -> int:
    """The same for a cache of this dtype, the scales of a quantized one included."""
    fmt = format_of(dtype)
    if fmt is None:
        return bytes_per_block(layers, block_size, dtype.itemsize)
    shapes = (layer.cache_shape for layer in layers)
    return sum(h * (fmt.key_bytes(block_size, dk) + block_size * fmt.vector_bytes(dv)) for h, dk, dv in shapes)


class KVPool:
    """Keys and values of `num_blocks` blocks, plus one scratch block (number `num_blocks`) that padding may write.

    backend: the attention backend whose layout the tensors have. Raises RunError where the memory cannot be had.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: str = "torch",
    ) -> None:
        import torch

        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        fmt = format_of(dtype)
        counts: dict[int, tuple[int, tuple[int, int, int]]] = {}
        for layer in layers:
            count, _ = counts.get(layer.group, (0, layer.cache_shape))
            counts[layer.group] = (count + 1, layer.cache_shape)
        self.groups: list[KVGroup] = []
        try:
            for number in sorted(counts):
                count, (heads, key_dim, value_dim) = counts[number]
                if backend == "compiled":
                    from .compiled import allocate

                    self.groups.append(KVGroup(*allocate(count, num_blocks + 1, block_size, heads, key_dim, dtype)))
                    continue
                shape = (count, num_blocks + 1, block_size, heads)
                key_shape: tuple[int, ...] = (*shape, key_dim)
                value_shape = (*shape, value_dim)
                if fmt is not None:
                    key_shape, value_shape = (*shape, fmt.vector_bytes(key_dim)), (*shape, fmt.vector_bytes(value_dim))
                    if fmt.by_channel:
                        key_shape = (count, num_blocks + 1, heads, fmt.key_bytes(block_size, key_dim))
                self.groups.append(
                    KVGroup(
                        *(
                            torch.zeros(*one, dtype=torch.uint8 if fmt else dtype, device=device).view(dtype)
                            for one in (key_shape, value_shape)
                        )
                    )
                )
        except RuntimeError as error:  # torch raises RuntimeError on CPU and its subclass OutOfMemoryError on CUDA
            need = block_bytes(layers, block_size, dtype) * (num_blocks + 1)
            raise RunError(
                f"the KV pool of {num_blocks} blocks of {block_size} tokens needs {need / 2**20:.0f} MiB, which "
                f"{device} does not have",
                what_to_do="Set a smaller kv_cache_memory, num_blocks or memory_utilization",
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes held, the scratch block included."""
        return sum(g.key.nbytes + g.value.nbytes for g in self.groups)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """(key of group 0, value of group 0, key of group 1, …): what is passed to the model as plain keyword."""
        return tuple(t for g in self.groups for t in (g.key, g.value))
