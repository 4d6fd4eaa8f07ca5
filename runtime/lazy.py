"""A model whose weights stay in their files: single modules are filled when they are needed and emptied again.

`open_lazy` builds the module tree with its parameters on the meta device and real buffers; `LazyWeights` knows in which
file each tensor lies. What a pass has changed lies in files of its own, which `overlay` puts before the source's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..optimizer.errors import RunError
from .checkpoint_names import CheckpointNames
from .memory import give_back
from .packed_load import build_empty, ignorable, is_wide, own_dtypes
from .tensor_files import Stored, all_finite, locate, not_finite, read_rows, read_stored
from .weight_files import weight_files

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..optimizer.model import LoadedModel
    from .experts import Leaves


class LazyWeights:
    """The stored tensors of a model on the meta device, by their names in its state dict.

    aliases: tied names, and the name under which their tensor is stored. Floating-point tensors are converted to
    `dtype` as they are read, those of the source only; each of the source's is checked once for NaN and infinity, which
    a narrower dtype may bring.
    names: how the source's files call them; dtypes: of those that the model keeps in another than `dtype`.
    """

    def __init__(
        self, module: nn.Module, stored: dict[str, Stored], aliases: dict[str, str], dtype: torch.dtype, source: str
    ) -> None:
        self.module, self.stored, self.aliases, self.dtype, self.source = module, stored, aliases, dtype, source
        self.converts = True
        self.names = CheckpointNames(module, ())
        self.dtypes: dict[str, torch.dtype] = {}
        self.by_rows: set[str] = set()
        """Names of those that are filled with some of their rows only, see `embedding_rows.py`."""
        self._overlaid: set[str] = set()
        self._finite: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors of the model, once they are in memory."""
        sizes = {}
        for name, tensor in self.module.state_dict().items():
            sizes[self.aliases.get(name, name)] = tensor.nbytes
        return sum(sizes.values())

    def place(self, name: str) -> Stored:
        """Where the tensor of that state-dict name lies. Raises RunError where no file has it."""
        found = self.stored.get(self.aliases.get(name, name))
        if found is None:
            raise RunError(f"no weight file has {name}", self.source)
        return found

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the CPU. Raises WeightError where a value of the source is NaN, infinite or
        beyond the dtype that the model has it in.
        """
        return self._own(name, read_stored(self.place(name)))

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """What `read` gives, in parts of some PART bytes that follow each other along the first axis."""
        for place in self.place(name).parts():
            yield self._own(name, read_stored(place), whole=False)
        self._finite.add(self.aliases.get(name, name))

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """The rows of a matrix at these indices (int64 `[n]`): what `read(name)[indices]` gives, and checked as that
        is, with no more than PART bytes of the others in memory. Raises RunError where an index lies outside.
        """
        place = self.place(name)
        if self._needs_check(name):
            for _ in self.parts(name):
                pass
        return self._own(name, read_rows(place, indices.tolist()))

    def _needs_check(self, name: str) -> bool:
        key = self.aliases.get(name, name)
        return key not in self._finite and key not in self._overlaid

    def _own(self, name: str, stored: torch.Tensor, whole: bool = True) -> torch.Tensor:
        """A tensor of the files, or a part of one, in the dtype that the model has it in, and checked."""
        key = self.aliases.get(name, name)
        if key in self._overlaid or not stored.is_floating_point():
            return stored
        tensor = stored
        if key in self.dtypes:
            tensor = stored.to(self.dtypes[key])
        elif self.converts and is_wide(name, stored):
            tensor = stored.to(self.dtype)
        if key not in self._finite:
            if not all_finite(tensor):
                raise not_finite(key, tensor, self.source, stored)
            if whole:
                self._finite.add(key)
        return tensor

    def load(self, *names: str) -> None:
        """Fill the modules of these names (`""` is the whole model), with everything below them."""
        import torch

        with torch.inference_mode(False):  # so that the parameters are plain tensors wherever they are loaded
            for full, owner, leaf, table in _tensors(self.module, names):
                if table[leaf].is_meta:
                    tensor = self._shared(full)
                    _put(owner, leaf, tensor if tensor is not None else self.read(full))

    def fill(self) -> None:
        """Fill the whole model, and stack experts that are single plain layers, as transformers has them."""
        from .experts import stack_experts

        self.load("")
        stack_experts(self.module)

    def release(self, *names: str) -> None:
        """Empty the modules of these names: their stored tensors go back to the meta device."""
        self._release(names, set())

    @contextmanager
    def loaded(self, *names: str) -> Iterator[None]:
        """Fill these modules for the duration. What was filled before stays filled."""
        before = {full for full, _, leaf, table in _tensors(self.module, names) if not table[leaf].is_meta}
        self.load(*names)
        try:
            yield
        finally:
            self._release(names, before)

    def _release(self, names: Iterable[str], spared: set[str]) -> None:
        import torch

        with torch.inference_mode(False):
            for full, owner, leaf, table in _tensors(self.module, names):
                stored = self.aliases.get(full, full) in self.stored
                if stored and full not in spared and not table[leaf].is_meta:
                    _put(owner, leaf, torch.empty_like(table[leaf], device="meta"))
        give_back()

    def overlay(self, files: Iterable[Path], aliases: Mapping[str, str] | None = None) -> None:
        """Let the tensors of `files` take the place of the stored ones of the same names.

        A tied name that a file holds is tied no more; `aliases` are ties within the files.
        """
        found = locate(files)
        self.stored.update(found)
        self._overlaid.update(found)
        for name in found:
            self.aliases.pop(name, None)
        self.aliases.update(aliases or {})

    def forget(self) -> None:
        """Drop stored tensors that the model no longer has, such as the weight of a layer that was packed."""
        names = {self.aliases.get(name, name) for name in self.module.state_dict()}
        self.stored = {name: place for name, place in self.stored.items() if name in names}

    def split_experts(self, chosen: Mapping[str, Leaves]) -> None:
        """Make single layers of stacked experts, whose weights are then read as parts of the stacked ones."""
        from .experts import layout_of, split_experts

        for name, leaves in chosen.items():
            layout = layout_of(self.module.get_submodule(name))
            if layout is None:
                raise RunError("holds no stacked experts of a known layout", name)
            split_experts(self.module, {name: leaves})
            held = {own: self.stored.pop(f"{name}.{own}") for own in layout.parameters}
            for number in range(layout.num_experts):
                for leaf, kind, owner, rows in layout.parts(leaves):
                    place = held[owner].at(number).part(rows, layout.transposed and kind == "weight")
                    self.stored[f"{name}.{number}.{leaf}.{kind}"] = place

    def _shared(self, name: str) -> torch.Tensor | None:
        """The tensor of a name tied to this one, where that is filled already."""
        key = self.aliases.get(name, name)
        for other in [key, *(alias for alias, target in self.aliases.items() if target == key)]:
            if other == name or other in self.by_rows:
                continue
            path, _, leaf = other.rpartition(".")
            try:
                tensor = self.module.get_submodule(path)._parameters.get(leaf)
            except AttributeError:
                continue
            if tensor is not None and not tensor.is_meta:
                return tensor
        return None


def open_lazy(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    source: str,
    trust_remote_code: bool = False,
    packed: bool = False,
) -> tuple[PreTrainedModel, LazyWeights] | str:
    """The folder's model without its weights, in eval mode; or a sentence that says why it must be loaded whole.

    Experts that the files hold singly are single layers in the model too. It must be loaded whole where the tensors of
    the files are not those of the modules (transformers merges others as it loads).
    """
    from .experts import find_stacked, split_experts, stored_singly

    module = build_empty(config, dtype, trust_remote_code)
    places = locate(weight_files(folder))
    own_names = CheckpointNames(module, places)
    places = {own_names.in_module(name): place for name, place in places.items()}
    split_experts(module, stored_singly(places, find_stacked(module)))
    if packed and not _pack(module, config, dtype, folder):
        return "its quantized layers have a format that is decompressed while it loads"
    names = module.state_dict()
    stored = {name: place for name, place in places.items() if name in names or not ignorable(module, name)}
    aliases = _ties(module, stored)
    unknown = sorted(set(stored) - set(names))
    absent = sorted(name for name in names if aliases.get(name, name) not in stored)
    if unknown or absent:
        what = f"has {unknown[0]}" if unknown else f"lacks {absent[0]}"
        return f"the weight files do not hold the model's tensors as they are (their list {what})"
    weights = LazyWeights(module, stored, aliases, dtype, source)
    weights.names, weights.dtypes = own_names, own_dtypes(module, dtype)
    weights.converts = not packed or dtype != getattr(config, "dtype", dtype)
    for name, tensor in list(names.items()):
        if tuple(tensor.shape) != weights.place(name).shape:
            return f"{name} is stored in another shape"
        if not tensor.is_meta:  # a persistent buffer
            path, _, leaf = name.rpartition(".")
            _put(module.get_submodule(path), leaf, weights.read(name))
    return module.eval(), weights


def outside_blocks(module: nn.Module, blocks_name: str) -> list[str]:
    """Names of the modules that hold tensors of their own outside the decoder blocks."""
    prefix = f"{blocks_name}."
    return [
        name
        for name, child in module.named_modules()
        if not name.startswith(prefix) and name != blocks_name and (child._parameters or child._buffers)
    ]


@contextmanager
def leading_blocks(model: LoadedModel) -> Iterator[int | None]:
    """Let a lazy model run with the weights of few blocks: those up to the first of every attention type compute, the
    others hand their input on. Yields how many compute; None where the model is in memory, and all do.
    """
    from .decoder_blocks import find_blocks, only_first

    if model.weights is None:
        yield None
        return
    name, blocks = find_blocks(model.module)
    types = list(getattr(model.module.config.get_text_config(), "layer_types", None) or [""])
    count = max(types.index(kind) for kind in set(types)) + 1
    needed = [*outside_blocks(model.module, name), *(f"{name}.{index}" for index in range(count))]
    with model.loaded(*needed), only_first(blocks, count):
        yield count


def _pack(module: PreTrainedModel, config: PreTrainedConfig, dtype: torch.dtype, folder: Path) -> bool:
    """Put quantized layers where the config has them; False where their format is not one of this package's."""
    from .library_formats import install_library_layers, runs_library_format
    from .packed_format import install_packed_linears, runs_packed

    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return True
    arguments = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if runs_library_format(arguments):
        install_library_layers(module, folder, arguments, dtype)
        return True
    if not runs_packed(arguments):
        return False
    install_packed_linears(module, arguments, dtype, folder)
    return True


def _ties(module: PreTrainedModel, stored: dict[str, Stored]) -> dict[str, str]:
    """Tied names → the name whose tensor stands for both. Where the files hold both and they are equal, one is dropped
    from `stored`; where they differ, they are not tied.
    """
    import torch

    aliases = {}
    for target, source in module.get_expanded_tied_weights_keys(all_submodels=True).items():
        if target in stored and source in stored:
            if not torch.equal(read_stored(stored[target]), read_stored(stored[source])):
                continue
            del stored[target]
        if target not in stored and source in stored:
            aliases[target] = source
        elif source not in stored and target in stored:
            aliases[source] = target
    return aliases


def _tensors(module: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, nn.Module, str, dict[str, torch.Tensor]]]:
    """Full name, owner, own name and table of every parameter and persistent buffer below the named modules."""
    seen = set()
    for name in names:
        for path, owner in module.get_submodule(name).named_modules(prefix=name, remove_duplicate=False):
            for table in (owner._parameters, owner._buffers):
                for leaf, tensor in list(table.items()):
                    full = f"{path}.{leaf}" if path else leaf
                    if tensor is None or leaf in owner._non_persistent_buffers_set or full in seen:
                        continue
                    seen.add(full)
                    yield full, owner, leaf, cast("dict[str, torch.Tensor]", table)


def _put(owner: nn.Module, leaf: str, tensor: torch.Tensor) -> None:
    """Make `tensor` the parameter or buffer `leaf` of its owner."""
    from torch import nn

    if leaf not in owner._parameters:
        owner._buffers[leaf] = tensor
    elif isinstance(tensor, nn.Parameter):
        owner._parameters[leaf] = tensor
    else:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
