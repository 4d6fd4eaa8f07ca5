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
from .tokens import TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_gpt2(module: PreTrainedModel) -> bool:
    return module.config.model_type == "gpt2"


def write_gpt2(graph: Graph, module: PreTrainedModel, choices: Choices) -> tuple[Linears, AttentionShape, int]:
    """Write the decoder of a prepared model (`prepare.turn_conv1d`). Raises UsageError for cross-attention, and for
    an activation without an operator."""
    config: Any = module.config
    if config.add_cross_attention:
        raise UsageError("gpt2 is written without cross-attention", "onnx")
    shape = AttentionShape(config.n_head, config.n_head, config.n_embd // config.n_head)
    types = onnx_library().TensorProto
    base: Any = module.base_model
    head: Any = module.get_output_embeddings()
    linears = Linears(graph, choices)
    operators = Operators(graph, choices, linears, config.layer_norm_epsilon)
    tied = getattr(head, "weight", None) is base.wte.weight
    writer = _Gpt2(base, operators, TokenTable(linears, base.wte.weight, LinearPart("lm_head", head), tied))
    graph.input("input_ids", types.INT64, ["batch_size", "sequence_length"])
    element = types.FLOAT16 if operators.half else types.FLOAT
    graph.output("logits", element, ["batch_size", "sequence_length", head.out_features])
    logits = writer.write(make_attention(operators, choices, shape, _no_rotation))
    graph.node("Identity", [logits], ["logits"])
    return linears, shape, head.out_features


class _Gpt2:
    """One decoder on its way into a graph. base: transformers' GPT2Model."""

    def __init__(self, base: Any, operators: Operators, tokens: TokenTable) -> None:
        self.base, self.operators, self.tokens = base, operators, tokens
        self.graph, self.linears = operators.graph, operators.linears
        self.kind = _activation(base.h[0].mlp.act)

    def write(self, attention: Attention) -> Name:
        """From input_ids to logits."""
        learned = self.linears.plain("positions.weight", self.base.wpe.weight)
        places = self.graph.node("Gather", [learned, attention.positions()], axis=0, where="positions")
        hidden = self.graph.node("Add", [self.tokens.embed(), places], where="embedding")
        delta: Name | None = None
        for index, block in enumerate(self.base.h):
            hidden, delta = self._block(index, block, attention, hidden, delta)
        normed, _ = self.operators.add_layer_norm(hidden, delta, self.base.ln_f, "ln_f")
        return self.tokens.logits(normed)

    def _block(
        self, index: int, block: Any, attention: Attention, hidden: Name, delta: Name | None
    ) -> tuple[Name, Name]:
        """The residual stream before this block's last addition, and what is to be added."""
        operators, where = self.operators, f"layers.{index}"
        normed, hidden = operators.add_layer_norm(hidden, delta, block.ln_1, f"{where}/ln_1")
        q = self._linear("c_attn", block.attn.c_attn, normed, f"{where}/attention")
        k = v = ""
        if operators.choices.flavor == "ort":  # GroupQueryAttention takes the three as they come
            sizes = self.graph.ints(*[block.attn.split_size] * 3)
            q, k, v = self.graph.node("Split", [q, sizes], 3, axis=-1, where=where)
        layer = AttentionLayer(index, float(block.attn.scaling))
        mixed = attention(layer, q, k, v, f"{where}/attention")
        delta = self._linear("c_proj", block.attn.c_proj, mixed, f"{where}/attention")
        normed, hidden = operators.add_layer_norm(hidden, delta, block.ln_2, f"{where}/ln_2")
        wide = self._linear("c_fc", block.mlp.c_fc, normed, f"{where}/mlp")
        active = operators.activation(self.kind, wide, f"{where}/mlp")
        return hidden, self._linear("c_proj", block.mlp.c_proj, active, f"{where}/mlp")

    def _linear(self, name: str, module: Any, x: Name, where: str) -> Name:
        return self.linears([LinearPart(name, module)], x, where)[0]


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
