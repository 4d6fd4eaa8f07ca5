"""Reads the structure of a Hugging Face causal language model, for the fused decoder.

Nothing is assumed from a model's name. The parts are found by their shape and, where the shape leaves a question (does
a
norm multiply by w or by 1 + w? which activation is it? what factor follows the embedding?), by running the part on a
probe. Whatever is not understood is refused with its name, never skipped.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

ACTIVATIONS = {
    "silu": (0, nn.functional.silu),
    "gelu_tanh": (1, lambda x: nn.functional.gelu(x, approximate="tanh")),
    "gelu": (2, nn.functional.gelu),
    "relu": (3, nn.functional.relu),
}
POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")
_LAYER_CHILDREN = {
    "self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "resid_attn_dropout", "resid_mlp_dropout",
}  # fmt: skip
_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_norm", "k_norm"}
_MLP_CHILDREN = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "act_fn", "activation_fn"}


class UnsupportedModel(ValueError):
    """The fused decoder does not understand a part of this model; the message names it."""


@dataclass(frozen=True)
class LinearPart:
    """Rows [first, first + rows) of a linear module; rows 0: all of them."""

    name: str
    module: nn.Module
    first: int = 0
    rows: int = 0


@dataclass
class Layer:
    """One decoder layer. Norm weights are float32 and multiply directly; None where the model has no such norm."""

    q: LinearPart
    k: LinearPart
    v: LinearPart
    o: LinearPart
    gate: LinearPart
    up: LinearPart
    down: LinearPart
    input_norm: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    pre_mlp_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    window: int
    rope: str | None
    """The layer type whose rotary frequencies apply (`""` where the model has one kind); None: no rotation."""
    activation: str
    attention_scale: float
    attention_cap: float
    residual_scale: float


@dataclass
class ModelStructure:
    """What the fused decoder needs to know of a model."""

    layers: list[Layer]
    embedding: torch.Tensor
    embedding_scale: float
    final_norm: torch.Tensor
    norm_eps: float
    norm_roundings: int
    """How often the norms round to bfloat16 (2: before the weight too) where the model is held in it."""
    head: LinearPart
    head_tied: bool
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rotary: nn.Module
    logit_scale: float
    logit_cap: float
    dtype: torch.dtype
    linears: list[LinearPart] = field(default_factory=list)


def _fail(reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"the fused decoder does not support this model: {reason}")


def _children(module: nn.Module, known: set[str], where: str) -> None:
    for name, child in module.named_children():
        if name not in known:
            raise _fail(f"{where} has an unknown part {name!r} ({type(child).__name__})")
    for name, _ in module.named_parameters(recurse=False):
        if name != "sinks":
            raise _fail(f"{where} has an unknown parameter {name!r}")


@dataclass
class _Norms:
    """What the norms seen so far have in common: their epsilons, and how often they round to bfloat16 on the way."""

    epsilons: set[float] = field(default_factory=set)
    roundings: set[int] = field(default_factory=set)


def _norm(module: nn.Module | None, where: str, norms: _Norms) -> torch.Tensor | None:
    """The weight w with module(x) = x / rms(x) * w."""
    if module is None:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if eps is None or weight is None or getattr(module, "bias", None) is not None:
        raise _fail(f"{where} ({type(module).__name__}) is no RMSNorm with a weight")
    norms.epsilons.add(float(eps))
    probe = torch.linspace(-2, 3, weight.numel()).to(weight.dtype)
    out = module(probe.unsqueeze(0))[0].float()
    normed = probe.float() * torch.rsqrt(probe.float().pow(2).mean() + eps)
    plain = weight.detach().float()
    tolerance = 1e-5 if weight.dtype == torch.float32 else 0.02
    for candidate in (plain, 1.0 + plain):
        if torch.allclose(out, normed * candidate, atol=tolerance, rtol=tolerance):
            norms.roundings |= _rounding(out, normed, candidate)
            return candidate.clone()
    raise _fail(f"{where} ({type(module).__name__}) does not compute x / rms(x) * w or x / rms(x) * (1 + w)")


def _rounding(out: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor) -> set[int]:
    """How often a norm rounds to bfloat16: 1, after the weight, or 2, before it too; nothing where both look alike."""
    once = int((out == (normed * weight).bfloat16()).sum())
    twice = int((out == (normed.bfloat16() * weight).bfloat16()).sum())
    return set() if once == twice else {1 if once > twice else 2}


def _activation(module: Any, where: str) -> str:
    probe = torch.linspace(-6, 6, 101)
    if not callable(module):
        raise _fail(f"{where} has no activation function")
    out = module(probe)
    for name, (_, function) in ACTIVATIONS.items():
        if torch.allclose(out, function(probe), atol=1e-6):
            return name
    raise _fail(f"the activation of {where} ({type(module).__name__}) is none of {', '.join(ACTIVATIONS)}")


def _linear(parent: nn.Module, name: str, where: str, first: int = 0, rows: int = 0) -> LinearPart:
    module = getattr(parent, name, None)
    if module is None:
        raise _fail(f"{where} has no {name}")
    if type(module) is not nn.Linear and not hasattr(module, "quant_state"):
        raise _fail(f"{where}.{name} is a {type(module).__name__}, neither a plain linear layer nor a packed one")
    return LinearPart(f"{where}.{name}", module, first, rows)


def _window(attention: nn.Module, config: Any, index: int) -> int:
    window: Any
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        types = getattr(config, "layer_types", None)
        sliding = types is None or types[index] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if sliding else None
    return int(window) if window else 0


def _layer(module: nn.Module, index: int, config: Any, typed_rope: bool, norms: _Norms) -> Layer:
    where = f"layers.{index}"
    _children(module, _LAYER_CHILDREN, where)
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    if attention is None or mlp is None:
        raise _fail(f"{where} has no self_attn or no mlp")
    _children(attention, _ATTENTION_CHILDREN, f"{where}.self_attn")
    _children(mlp, _MLP_CHILDREN, f"{where}.mlp")
    if not getattr(attention, "is_causal", True):
        raise _fail(f"{where}.self_attn is not causal")
    head_dim, at = attention.head_dim, f"{where}.self_attn"
    if hasattr(attention, "qkv_proj"):
        q_rows, kv_rows = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        q = _linear(attention, "qkv_proj", at, 0, q_rows)
        k = _linear(attention, "qkv_proj", at, q_rows, kv_rows)
        v = _linear(attention, "qkv_proj", at, q_rows + kv_rows, kv_rows)
    else:
        q, k, v = (_linear(attention, f"{name}_proj", at) for name in "qkv")
    if hasattr(mlp, "gate_up_proj"):
        rows = mlp.gate_up_proj.out_features // 2
        gate = _linear(mlp, "gate_up_proj", f"{where}.mlp", 0, rows)
        up = _linear(mlp, "gate_up_proj", f"{where}.mlp", rows, rows)
    else:
        gate, up = _linear(mlp, "gate_proj", f"{where}.mlp"), _linear(mlp, "up_proj", f"{where}.mlp")
    own = {
        name: _norm(getattr(module, name, None), f"{where}.{name}", norms)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    }
    # With one norm around the MLP, `post_attention_layernorm` stands before it (Llama) unless the layer has no norm at
    # its
    # input, and then it follows the attention (OLMo 2); with a norm before the MLP it follows the attention (Gemma 2).
    follows = own["pre_feedforward_layernorm"] is not None or own["input_layernorm"] is None
    sinks = getattr(attention, "sinks", None)
    types = getattr(config, "layer_types", None)
    rope = (types[index] if typed_rope and types else "") if getattr(attention, "use_rope", True) else None
    return Layer(
        q, k, v, _linear(attention, "o_proj", at), gate, up, _linear(mlp, "down_proj", f"{where}.mlp"),
        input_norm=own["input_layernorm"],
        post_attention_norm=own["post_attention_layernorm"] if follows else None,
        pre_mlp_norm=own["pre_feedforward_layernorm"] if follows else own["post_attention_layernorm"],
        post_mlp_norm=own["post_feedforward_layernorm"],
        q_norm=_norm(getattr(attention, "q_norm", None), f"{at}.q_norm", norms),
        k_norm=_norm(getattr(attention, "k_norm", None), f"{at}.k_norm", norms),
        sinks=None if sinks is None else sinks.detach().float(),
        window=_window(attention, config, index),
        rope=rope,
        activation=_activation(getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None)), f"{where}.mlp"),
        attention_scale=float(attention.scaling),
        attention_cap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        residual_scale=float(getattr(module, "residual_multiplier", 1.0)),
    )  # fmt: skip


def _rotary(base: nn.Module) -> nn.Module:
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        raise _fail("it has no rotary_emb")
    kinds = getattr(rotary, "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
        if kind in POSITION_DEPENDENT_ROPE:
            raise _fail(f"rope type {kind!r} changes its frequencies with the length of the batch")
    return rotary


def rope_table(rotary: nn.Module, layer_type: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [length, half], of positions 0 … length - 1. Raises UnsupportedModel where the two halves of
    the table differ (interleaved rotation)."""
    arguments = {"layer_type": layer_type} if layer_type else {}
    with torch.no_grad():
        cos, sin = rotary(torch.zeros(1), torch.arange(length).unsqueeze(0), **arguments)
    if cos.dim() != 3 or cos.shape[:2] != (1, length) or cos.dtype != torch.float32:
        raise _fail(f"rotary_emb returned {tuple(cos.shape)} {cos.dtype}")
    half = cos.shape[-1] // 2
    if not torch.equal(cos[..., :half], cos[..., half:]):
        raise _fail("its rotary embedding is interleaved")
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


@torch.no_grad()
def recognize(model: nn.Module) -> ModelStructure:
    """The structure of a causal language model on the CPU. Raises UnsupportedModel with the first part not
    understood."""
    base, head, config = getattr(model, "model", None), getattr(model, "lm_head", None), getattr(model, "config", None)
    if base is None or head is None or config is None or not hasattr(base, "layers"):
        raise _fail(f"{type(model).__name__} has no model.layers and lm_head")
    _children(model, {"model", "lm_head"}, type(model).__name__)
    _children(base, {"embed_tokens", "layers", "norm", "rotary_emb"}, "model")
    rotary, norms = _rotary(base), _Norms()
    typed = "layer_type" in inspect.signature(rotary.forward).parameters
    layers = [_layer(module, i, config, typed, norms) for i, module in enumerate(base.layers)]
    embedding = base.embed_tokens
    if not isinstance(embedding, nn.Embedding):
        raise _fail(f"its embedding is a {type(embedding).__name__}")
    rows = torch.arange(min(8, embedding.num_embeddings))
    plain, scaled = embedding.weight[rows].float(), embedding(rows).float()
    factor = float((plain * scaled).sum() / plain.pow(2).sum().clamp_min(1e-30))
    if not torch.allclose(scaled, plain * factor, rtol=0.01, atol=1e-6):
        raise _fail(f"its embedding ({type(embedding).__name__}) is no table times a factor")
    exact: Any = getattr(embedding, "embed_scale", None)
    factor = factor if exact is None else float(exact.to(embedding.weight.dtype))
    final_norm = _norm(base.norm, "norm", norms)
    if final_norm is None:
        raise _fail("it has no norm before the head")
    if len(norms.epsilons) != 1:
        raise _fail(f"its norms use different epsilons {sorted(norms.epsilons)}")
    attention = base.layers[0].self_attn
    head_part = _linear(model, "lm_head", type(model).__name__)
    if embedding.weight.dtype not in (torch.float32, torch.bfloat16):
        raise _fail(f"its embedding is {embedding.weight.dtype}, neither float32 nor bfloat16")
    structure = ModelStructure(
        layers=layers,
        embedding=embedding.weight.detach(),
        embedding_scale=factor * float(getattr(base, "embedding_multiplier", 1.0)),
        final_norm=final_norm,
        norm_eps=norms.epsilons.pop(),
        norm_roundings=2 if norms.roundings == {2} else 1,
        head=head_part,
        head_tied=getattr(head, "weight", None) is embedding.weight,
        hidden=embedding.embedding_dim,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        vocab=head.out_features,
        rotary=rotary,
        logit_scale=float(getattr(model, "logit_scale", 1.0)) / float(getattr(config, "logits_scaling", None) or 1.0),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        dtype=embedding.weight.dtype,
    )
    structure.linears = [
        getattr(layer, name) for layer in layers for name in ("q", "k", "v", "o", "gate", "up", "down")
    ]
    _check_shapes(structure)
    return structure


def _check_shapes(s: ModelStructure) -> None:
    if s.heads % s.kv_heads:
        raise _fail(f"{s.heads} query heads over {s.kv_heads} KV heads")
    for i, layer in enumerate(s.layers):
        for part, rows, columns in (
            (layer.q, s.heads * s.head_dim, s.hidden),
            (layer.k, s.kv_heads * s.head_dim, s.hidden),
            (layer.v, s.kv_heads * s.head_dim, s.hidden),
            (layer.o, s.hidden, s.heads * s.head_dim),
        ):
            got = (part.rows or part.module.out_features, part.module.in_features)
            if got != (rows, columns):
                raise _fail(f"{part.name} is {got}, not ({rows}, {columns})")
        for weight, full in ((layer.q_norm, s.heads), (layer.k_norm, s.kv_heads)):
            if weight is not None and weight.numel() not in (s.head_dim, full * s.head_dim):
                raise _fail(f"the q/k norm of layer {i} has {weight.numel()} weights")
        if (layer.q_norm is None) != (layer.k_norm is None):
            raise _fail(f"layer {i} normalizes only one of queries and keys")
