"""What the engine must know of a model before it may run it, found by calling it once on a few tokens.

The attention function is replaced by a recorder. An architecture that bypasses `AttentionInterface` (falcon, bloom,
mpt …) records fewer calls than it has layers; it would run under the engine and be silently wrong, so it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import LlmoptError, RunError
from .interface import BACKEND_ATTRIBUTE, LAYER_ATTRIBUTE, probing, register_interface
from .layer import AttentionLayer
from .pool import group_layers

if TYPE_CHECKING:
    from torch import Tensor, nn

INSTEAD = "Use the static-batch runtime (StaticBatch), which runs each request by itself"
ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
FEED_FORWARD = {"sparse", "dense", "moe"}
UNSUPPORTED_ARGUMENTS = ("position_bias", "indices", "head_mask", "attention_bias", "alibi")
PROBE_TOKENS = 3


@dataclass(frozen=True)
class ModelProbe:
    """layers in the order of their calls, each with the module that made it.

    needs_cache: the model must be given a `StepCache`. cache_argument: its name in `forward` (`cache`, or
    `past_key_values` before transformers 5.20). keeps_logits: `forward` takes `logits_to_keep`.
    passes_keywords: keyword arguments of `forward` reach the attention function (needed to compile the model).
    """

    layers: tuple[AttentionLayer, ...]
    modules: tuple[nn.Module, ...]
    needs_cache: bool
    cache_argument: str
    keeps_logits: bool
    passes_keywords: bool
    vocab_size: int

    def attach(self, backend: str) -> None:
        """Tell every attention module its layer and backend."""
        for module, layer in zip(self.modules, self.layers, strict=True):
            setattr(module, LAYER_ATTRIBUTE, layer)
            setattr(module, BACKEND_ATTRIBUTE, backend)

    def detach(self) -> None:
        """Undo `attach`."""
        for module in self.modules:
            for name in (LAYER_ATTRIBUTE, BACKEND_ATTRIBUTE):
                if hasattr(module, name):
                    delattr(module, name)


def text_config(model: Any) -> Any:
    """The configuration of the decoder, also of a model that has other parts."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Switch the model's attention implementation for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before or "eager")


class _ProbeCache:
    """Returns what it is given, and remembers the shapes and whether a layer asked for its length.

    A model that asks for the length outside its layers does so to number positions, which it is given.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.asked_length = False

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object) -> Any:
        self.shapes[layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
        return key, value

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        self.asked_length = self.asked_length or layer_idx is not None
        return 0


class _Recorder:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers: list[AttentionLayer] = []
        self.modules: list[nn.Module] = []
        self.faults: list[str] = []
        self.passes_keywords = True

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Tensor:
        name = type(module).__name__
        if attention_mask is not None:
            self.faults.append(f"{name} builds its own attention mask")
        self.passes_keywords = self.passes_keywords and kwargs.get("paged_slots") is not None
        if getattr(module, "is_causal", True) is False:
            self.faults.append(f"{name} is not causal")
        for argument in UNSUPPORTED_ARGUMENTS:
            if kwargs.get(argument) is not None:
                self.faults.append(f"{name} passes {argument}, which no paged backend takes")
        layer_idx = getattr(module, "layer_idx", None)
        layer_idx = len(self.layers) if layer_idx is None else layer_idx
        window, chunk = self.reach(layer_idx, kwargs)
        self.layers.append(
            AttentionLayer(
                layer_idx=layer_idx,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=query.shape[-1],
                value_dim=value.shape[-1],
                cache_heads=key.shape[1],
                cache_key_dim=key.shape[-1],
                cache_value_dim=value.shape[-1],
                window=window,
                chunk=chunk,
                softcap=float(kwargs.get("softcap") or 0.0),
                has_sinks=kwargs.get("s_aux") is not None,
            )
        )
        self.modules.append(module)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def reach(self, layer_idx: int, kwargs: dict[str, Any]) -> tuple[int, int]:
        """(window, chunk) of a layer: the keyword argument, else the configuration's `layer_types`."""
        config = self.config
        types = getattr(config, "layer_types", None) or []
        kind = types[layer_idx] if layer_idx < len(types) else None
        chunk = int(getattr(config, "attention_chunk_size", 0) or 0) if kind == "chunked_attention" else 0
        if "sliding_window" in kwargs:
            return int(kwargs["sliding_window"] or 0), chunk
        declared = int(getattr(config, "sliding_window", 0) or 0)
        if kind == "sliding_attention" or (kind is None and getattr(config, "use_sliding_window", True)):
            return declared, chunk
        return 0, chunk


def _refuse(model: Any, reason: str) -> RunError:
    return RunError(f"the continuous-batching engine cannot run {type(model).__name__}: {reason}", "", INSTEAD)


def _declared_fault(model: Any) -> str | None:
    config = text_config(model)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    other = sorted(set(getattr(config, "layer_types", None) or []) - ATTENDING - FEED_FORWARD)
    if other:
        return f"layers of type {', '.join(other)} keep a state of their own beside keys and values"
    if not hasattr(model, "set_attn_implementation") or not model._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    return None


def probe_model(model: Any) -> ModelProbe:
    """Call the model once on three tokens with a recording attention function.

    Raises RunError, which names the alternative, for a model that the engine would run wrongly: fewer or more attention
    calls than layers, a mask or bias of its own, other state than keys and values.
    """
    fault = _declared_fault(model)
    if fault:
        raise _refuse(model, fault)
    name = register_interface()
    cache = _ProbeCache()
    try:
        recorder, logits = _record(model, name, cache)
        cached = True
    except (AttributeError, TypeError, RuntimeError):  # it wants more of a cache than we have: it may do without
        cache, cached = _ProbeCache(), False
        try:
            recorder, logits = _record(model, name, None)
        except LlmoptError:
            raise
        except Exception as error:
            raise _refuse(model, f"its forward fails on a flat batch ({type(error).__name__}: {error})") from error
    config = text_config(model)
    expected = int(config.num_hidden_layers)
    if recorder.faults:
        raise _refuse(model, recorder.faults[0])
    if len(recorder.layers) != expected or len({id(m) for m in recorder.modules}) != expected:
        raise _refuse(
            model, f"{len(recorder.layers)} calls reached the attention function, and it has {expected} layers"
        )
    layers = []
    gathers = False
    for layer in recorder.layers:
        shape = cache.shapes.get(layer.layer_idx, layer.cache_shape)
        if shape != layer.cache_shape:
            heads, key_dim, value_dim = shape
            layer = replace(layer, kind="gather", cache_heads=heads, cache_key_dim=key_dim, cache_value_dim=value_dim)
            gathers = True
        layers.append(layer)
    parameters = inspect.signature(model.forward).parameters
    return ModelProbe(
        layers=tuple(group_layers(layers)),
        modules=tuple(recorder.modules),
        needs_cache=gathers or (cached and cache.asked_length),
        cache_argument="cache" if "cache" in parameters else "past_key_values",
        keeps_logits="logits_to_keep" in parameters,
        passes_keywords=recorder.passes_keywords,
        vocab_size=logits.shape[-1],
    )


def _record(model: Any, name: str, cache: _ProbeCache | None) -> tuple[_Recorder, Tensor]:
    import torch

    recorder = _Recorder(text_config(model))
    device = next(model.parameters()).device
    positions = torch.arange(PROBE_TOKENS, device=device)
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"use_cache": False, "paged_slots": positions}
    if cache is not None:
        arguments["cache" if "cache" in parameters else "past_key_values"] = cache
    probing.recorder = recorder
    try:
        with attention_implementation(model, name), torch.no_grad():
            output = model(input_ids=positions[None], position_ids=positions[None], **arguments)
    finally:
        probing.recorder = None
    return recorder, output.logits


def unsupported_reason(model: Any) -> str | None:
    """Why the engine cannot run this model, or None where it can. Costs one forward over three tokens."""
    try:
        probe_model(model)
    except RunError as error:
        return error.what
    return None
