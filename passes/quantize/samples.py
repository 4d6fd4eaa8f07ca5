"""What scale searches know of a layer's inputs: means and maxima of each channel, and a sample of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class InputSample:
    """Statistics of the inputs of one layer, on their device.

    per_call: rows kept of each call, spread evenly over it.
    """

    def __init__(self, per_call: int) -> None:
        self.per_call, self.count = per_call, 0
        self._sum: torch.Tensor | float = 0.0
        self._largest: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []

    def add(self, inputs: torch.Tensor) -> None:
        """Take in `inputs` [..., K], any floating dtype."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        if not len(rows):
            return
        magnitudes = rows.abs()
        largest = magnitudes.amax(0).float()
        self._sum = self._sum + magnitudes.sum(0, dtype=torch.float32)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self.count += len(rows)
        if self.per_call:
            number = min(self.per_call, len(rows))
            self._rows.append(rows[torch.arange(number, device=rows.device) * len(rows) // number].clone())

    @property
    def mean_magnitude(self) -> torch.Tensor:
        """Mean |x| of each channel, float32 [K]; only where a row was seen."""
        assert isinstance(self._sum, torch.Tensor)
        return self._sum / self.count

    @property
    def largest(self) -> torch.Tensor:
        """Max |x| of each channel, float32 [K]; only where a row was seen."""
        assert self._largest is not None
        return self._largest

    @property
    def rows(self) -> torch.Tensor:
        """The sampled rows [R, K], in the inputs' dtype."""
        return torch.cat(self._rows)


@contextmanager
def sampling(layers: Mapping[str, nn.Module], per_call: int) -> Iterator[dict[str, InputSample]]:
    """Gather the inputs of the named layers while the context lasts."""
    samples = {name: InputSample(per_call) for name in layers}

    def watch(sample: InputSample) -> Any:
        return lambda module, args: sample.add(args[0])

    handles = [layer.register_forward_pre_hook(watch(samples[name])) for name, layer in layers.items()]
    try:
        yield samples
    finally:
        for handle in handles:
            handle.remove()
