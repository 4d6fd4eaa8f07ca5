"""Builds the graph of a GPT-2: learned positions, layer norms, biases everywhere, one matrix for queries, keys, values.

Radford et al. 2019, as transformers computes it (`models/gpt2/modeling_gpt2.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ...optimizer.errors import UsageError
from ...runtime.kernels.recognize import ACTIVATIONS, LinearPart
from .attention import Attention, AttentionLayer, AttentionShape, make_attention
from .graph import Graph, Name, onnx_library
from .linear import Linears
from .operators import Operators
from .settings import Choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_gpt2(module: PreTrainedModel) -> bool:
    return module.config.model_type == "gpt2"


def write_gpt2(graph: Graph, module: PreTrainedModel, choices: Choices) -> tuple[Linears, AttentionShape, int]:
    """Write the decoder. Raises UsageError for the flavor genai, and for options of GPT-2 that no release uses."""
    config: Any = module.config
    if choices.flavor != "ort":
        raise UsageError("gpt2 has learned positions, which the flavor genai has not", "onnx.flavor", "Set flavor=ort")
    if config.add_cross_attention or choices.share_head:
        raise UsageError("gpt2 is written without cross-attention and without share_head", "onnx")
    shape = AttentionShape(config.n_head, config.n_head, config.n_embd // config.n_head)
    types = onnx_library().TensorProto
    linears = Linears(graph, choices)
    operators = Operators(graph, choices, linears, config.layer_norm_epsilon)
    graph.input("input_ids", types.INT64, ["batch_size", "sequence_length"])
    element = types.FLOAT16 if operators.half else types.FLOAT
    head: Any = module.get_output_embeddings()
    graph.output("logits", element, ["batch_size", "sequence_length", head.out_features])
    attention = make_attention(operators, choices, shape, _no_rotation)
    base: Any = module.base_model
    tokens, positions = linears.plain("wte", base.wte.weight), linears.plain("wpe", base.wpe.weight)
    hidden = graph.node(
        "Add",
        [
            graph.node("Gather", [tokens, "input_ids"], axis=0, where="embedding"),
            graph.node("Gather", [positions, "position_ids"], axis=0, where="embedding"),
        ],
        where="embedding",
    )
    kind = _activation(base.h[0].mlp.act)
    for index, block in enumerate(base.h):
        hidden = _block(index, block, kind, hidden, operators, attention)
    hidden = operators.layer_norm(hidden, base.ln_f.weight, base.ln_f.bias, base.ln_f.eps, "ln_f")
    if getattr(head, "weight", None) is base.wte.weight:
        linears.counts["float"] += 1
        turned = graph.node("Transpose", [tokens], perm=[1, 0], where="lm_head")
        logits = graph.node("MatMul", [hidden, turned], where="lm_head")
    else:
        (logits,) = linears([LinearPart("lm_head", head)], hidden, "lm_head")
    graph.node("Identity", [logits], ["logits"])
    return linears, shape, head.out_features


def _block(index: int, block: Any, kind: str, hidden: Name, operators: Operators, attention: Attention) -> Name:
    graph, linears, where = operators.graph, operators.linears, f"layers.{index}"
    normed = operators.layer_norm(hidden, block.ln_1.weight, block.ln_1.bias, block.ln_1.eps, f"{where}/ln_1")
    (together,) = linears([_part(f"{where}.c_attn", block.attn.c_attn)], normed, f"{where}/attention")
    width = block.attn.split_size
    q, k, v = graph.node("Split", [together, graph.ints(width, width, width)], 3, axis=-1, where=where)
    layer = AttentionLayer(index, float(block.attn.scaling))
    mixed = attention(layer, q, k, v, f"{where}/attention")
    (out,) = linears([_part(f"{where}.c_proj", block.attn.c_proj)], mixed, f"{where}/attention")
    hidden = graph.node("Add", [hidden, out], where=where)
    normed = operators.layer_norm(hidden, block.ln_2.weight, block.ln_2.bias, block.ln_2.eps, f"{where}/ln_2")
    (wide,) = linears([_part(f"{where}.c_fc", block.mlp.c_fc)], normed, f"{where}/mlp")
    active = operators.activation(kind, wide, f"{where}/mlp")
    (out,) = linears([_part(f"{where}.mlp.c_proj", block.mlp.c_proj)], active, f"{where}/mlp")
    return graph.node("Add", [hidden, out], where=where)


def _part(name: str, module: Any) -> LinearPart:
    """A Conv1D (weight [K, N]) as a linear layer."""
    from torch import nn

    rows, columns = module.weight.shape[1], module.weight.shape[0]
    plain = nn.Linear(columns, rows, device="meta")
    plain.weight = nn.Parameter(module.weight.detach().t(), requires_grad=False)
    plain.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    return LinearPart(name, plain)


def _activation(module: Any) -> str:
    """Key of ACTIVATIONS, found by trying. Raises UsageError where it is none."""
    import torch

    probe = torch.linspace(-6, 6, 101)
    for name, (_, function) in ACTIVATIONS.items():
        if torch.allclose(module(probe), function(probe), atol=1e-5):
            return name
    raise UsageError(f"the activation {type(module).__name__} has no operator", "onnx")


def _no_rotation(kind: str) -> NoReturn:
    raise AssertionError("gpt2 has no rotary tables")
