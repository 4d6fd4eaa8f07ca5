"""Before the long run: will the widest block, its Hessians and the activations fit, and does the solver work here?

Takes seconds: one batch runs through the first block, and one Cholesky factorization of at most `TRIED` columns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...optimizer.errors import RunError
from ...runtime.kernels.calibration import backend
from ...runtime.memory import available_memory, resident_memory
from .data_free import fused_key
from .gptq import inverse_factor

if TYPE_CHECKING:
    from ...runtime.decoder_blocks import CapturedBatch
    from .targets import Target

TRIED = 2048
"""Columns of the largest matrix that is factorized as a trial; the time of a larger one is extrapolated."""
SOLVER_COPIES = 2
"""Matrices of a Hessian's size that following the original model takes; plain GPTQ works inside the Hessian."""
ACTIVATION_COPIES = 5
"""Float32 tensors of a batch's tokens times the widest layer that a block's forward holds."""
LEARN_COPIES = 3
"""How many times as much a block's forward and backward hold."""
ENOUGH = 4
"""How many times the states of all batches must fit into what is available to be kept in memory."""
WEIGHT_BYTES = 7
"""Bytes a weight while its layer is rounded: a float32 copy, codes as they come about, and as they are stored."""
LEARN_BYTES = 38
"""Bytes a weight while rounding is learned, float32 sources at most: the original, a copy, latent, mean, moments,
gradient, rounded."""
SLICES = 1 << 26
"""Bytes of whatever is done a few rows or columns at a time."""


@dataclass(frozen=True)
class Preflight:
    """Bytes of each kind at the peak of the widest block, and what there is; seconds of the largest factorization.

    live: the states of all batches between two blocks; between_parts: those between two parts of a block, where it is
    run so. offload: whether both go to files, because a quarter of what is available does not hold them. products:
    where sums of outer products are computed.
    """

    block: str
    weights: int
    hessians: int
    solver: int
    activations: int
    live: int
    between_parts: int
    available: int
    offload: bool
    cholesky_columns: int
    cholesky_seconds: float
    products: str

    @property
    def needed(self) -> int:
        """Bytes on top of what the process has now."""
        live = 0 if self.offload else self.live + self.between_parts
        return self.weights + self.hessians + self.solver + self.activations + live

    def check(self) -> None:
        """Raise RunError with the figures where the block will not fit."""
        if self.needed <= self.available:
            return
        parts = ("weights", "hessians", "solver", "activations", *(() if self.offload else ("live", "between_parts")))
        figures = ", ".join(f"{name} {getattr(self, name) / 2**20:,.0f}" for name in parts)
        raise RunError(
            f"quantizing it needs about {self.needed / 2**20:,.0f} MiB ({figures}) and "
            f"{self.available / 2**20:,.0f} MiB are available",
            where=self.block,
            what_to_do="Allow more memory, lower `batch_tokens`, or ignore the widest layers.",
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures as the report keeps them."""
        return {**asdict(self), "needed": self.needed, "cholesky_seconds": round(self.cholesky_seconds, 3)}


def preflight(
    block_bytes: Mapping[str, int],
    targets: Sequence[Target],
    groups: Sequence[Sequence[Target]],
    batch: CapturedBatch,
    num_tokens: int,
    max_memory: int | None,
    follows_original: bool = False,
    in_parts: bool = False,
    learns: bool = False,
) -> Preflight:
    """Estimate the peak of quantizing one block and try a factorization of the largest Hessian.

    block_bytes: weights of every block to come, by name. targets: their calibrated layers. groups: those of the
    widest block by equal inputs. batch: the first; num_tokens: of all batches. max_memory: bytes that the
    process may have. follows_original: the original model's states and products with its inputs are kept, too;
    in_parts: the inputs of single layers and their outputs are kept while a block is quantized; learns: after that the
    block's rounding is learned, beside its original.
    """
    block, weights = max(block_bytes.items(), key=lambda item: item[1])
    columns = max(target.in_features for target in targets)
    copies = SOLVER_COPIES if follows_original else 0
    solver = SLICES + max(
        copies * 4 * group[0].in_features ** 2 + WEIGHT_BYTES * sum(target.num_weights for target in group)
        for group in groups
    )
    if learns:
        solver += LEARN_BYTES * sum(target.num_weights for group in groups for target in group)
    hidden = batch.hidden
    tokens = hidden.shape[0] * hidden.shape[1]
    widest = max(max(target.in_features, target.out_features) for target in targets)
    live = hidden.nbytes // tokens * num_tokens * (3 if follows_original or learns else 1)
    between_parts = 0
    if in_parts:
        alone = [group[0] for group in groups if len(group) == 1]
        between_parts = hidden.element_size() * num_tokens * sum(max(t.in_features, t.out_features) for t in alone)
    free = available_memory() if hidden.device.type == "cpu" else torch.cuda.mem_get_info(hidden.device)[0]
    allowed = free if max_memory is None else min(free, max_memory - resident_memory())
    tried = min(columns, TRIED)
    seconds = _factorize(tried, hidden.device) * (columns / tried) ** 3
    return Preflight(
        block=block,
        weights=weights,
        hessians=hessian_bytes(groups) * (2 if follows_original else 1),
        solver=solver,
        activations=ACTIVATION_COPIES * 4 * tokens * widest * (LEARN_COPIES if learns else 1),
        live=live,
        between_parts=between_parts,
        available=max(0, allowed),
        offload=ENOUGH * (live + between_parts) > allowed,
        cholesky_columns=columns,
        cholesky_seconds=seconds,
        products=backend(),
    )


def hessian_bytes(groups: Sequence[Sequence[Target]]) -> int:
    """Bytes of one Hessian for each group of layers with the same input."""
    return sum(4 * group[0].in_features ** 2 for group in groups)


def named_groups(targets: Sequence[Target]) -> list[list[Target]]:
    """One block's layers by equal inputs, as far as names tell: those of one parent that engines fuse."""
    groups: dict[object, list[Target]] = {}
    for target in targets:
        groups.setdefault(fused_key(target.name), []).append(target)
    return list(groups.values())


def shapes_of(targets: Sequence[Target]) -> list[tuple[int, int]]:
    """The shapes of a block's layers, in order: blocks that differ in them are built differently."""
    return [(target.out_features, target.in_features) for target in targets]


def weights_of(block: nn.Module) -> int:
    """Bytes of a block's tensors, on whatever device they are."""
    return sum(tensor.nbytes for tensor in block.state_dict().values())


def _factorize(columns: int, device: torch.device) -> float:
    """Seconds to factorize a matrix of that size. Raises RunError where this machine's solver does not."""
    matrix = torch.eye(columns, device=device).add_(1.0 / columns)
    started = time.perf_counter()
    factor, _ = inverse_factor(matrix, torch.zeros(columns, dtype=torch.bool, device=device), 0.01)
    seconds = time.perf_counter() - started
    if not bool(torch.isfinite(factor).all()):
        raise RunError("the Cholesky factorization of a well-conditioned matrix failed", where="torch.linalg")
    return seconds
