"""LoadedModel, ModelInfo and the identity of a source: what passes work on and plan from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .runtime_spec import RuntimeSpec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..runtime.lazy import LazyWeights


@dataclass(frozen=True)
class SourceIdentity:
    """Where a model came from. `sha256` covers the names and contents of its weight, config and tokenizer files."""

    id: str
    """What the user named: a path, a hub id or a short name."""
    kind: str
    """`folder`, `hub` or `gguf`."""
    folder: Path
    """A Hugging Face folder with the model (for a GGUF file: its dequantized conversion in the cache)."""
    sha256: str
    revision: str | None = None
    gguf_file: str | None = None
    license: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What the manifest keeps: no path of this machine, except what the user typed."""
        out = {"id": self.id, "kind": self.kind, "sha256": self.sha256, "revision": self.revision}
        out.update(gguf_file=self.gguf_file, license=self.license)
        return {k: v for k, v in out.items() if v is not None}


@dataclass
class LoadedModel:
    """A model and everything that travels with it through the passes.

    weights: where it is set, the model is lazy: `module` is on the meta device and its tensors stay in their files, to
    be read module by module (`loaded`). Only passes that declare `streams` are given such a model.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: SourceIdentity
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    trust_remote_code: bool = False
    weights: LazyWeights | None = None

    @contextmanager
    def loaded(self, *names: str) -> Iterator[None]:
        """Have the weights of the named modules in memory for the duration; where the model is not lazy they are."""
        if self.weights is None:
            yield
            return
        with self.weights.loaded(*names):
            yield

    def materialize(self) -> None:
        """Read all weights of a lazy model, which is lazy no more; experts are stacked as transformers has them."""
        if self.weights is not None:
            self.weights.fill()
            self.weights = None

    @property
    def config(self) -> PreTrainedConfig:
        return self.module.config

    @property
    def generation_config(self) -> GenerationConfig:
        return cast("GenerationConfig", self.module.generation_config)  # every model that can generate has one

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a weight file, from the file's header.

    dtype: the safetensors name, such as `BF16`; name: what the file calls it, where that is known.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str
    name: str = ""


@dataclass
class ModelInfo:
    """A model's description without its weights: config, headers, and the module tree on the meta device.

    tensors: by the names that the model's state dict has for them, see `CheckpointNames`.
    """

    source: SourceIdentity
    config: PreTrainedConfig
    tensors: dict[str, TensorInfo]
    trust_remote_code: bool = False

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model's modules on the meta device; never given weights."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, trust_remote_code=self.trust_remote_code)
        model.tie_weights()
        return model

    @cached_property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Module name → (out_features, in_features) of every nn.Linear, in the order of the module tree.

        Without subclasses that are called otherwise, such as routers that return more than a product.
        """
        from torch import nn

        return {
            name: (module.out_features, module.in_features)
            for name, module in self.skeleton.named_modules()
            if isinstance(module, nn.Linear) and _is_called_as_linear(module)
        }

    @cached_property
    def not_called_as_linear(self) -> list[str]:
        """Names of the modules that derive from nn.Linear and are not among `linear_shapes`."""
        from torch import nn

        modules = self.skeleton.named_modules()
        return [name for name, module in modules if isinstance(module, nn.Linear) and name not in self.linear_shapes]

    @cached_property
    def output_embedding_name(self) -> str | None:
        """Name of the head (`lm_head` in most models)."""
        head = self.skeleton.get_output_embeddings()
        return next((n for n, m in self.skeleton.named_modules() if m is head), None) if head is not None else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of the most common dtype, by bytes stored."""
        import math

        totals: dict[int, int] = {}
        for tensor in self.tensors.values():
            size = tensor.nbytes // max(1, math.prod(tensor.shape))
            totals[size] = totals.get(size, 0) + tensor.nbytes
        return max(totals, key=lambda s: totals[s]) if totals else 2


def _is_called_as_linear(module: nn.Linear) -> bool:
    """Whether the module, on the meta device, turns inputs of K features into one tensor of N."""
    import torch
    from torch import nn

    if type(module).forward is nn.Linear.forward:
        return True
    try:
        with torch.no_grad():
            output = module(torch.empty(2, 3, module.in_features, dtype=module.weight.dtype, device="meta"))
    except Exception:  # whatever a subclass's own code raises
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, 3, module.out_features)
