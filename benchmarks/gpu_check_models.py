"""What `gpu_check.py` runs: models of known shapes with random weights, their bytes, and torch's int4 product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    }),
    "qwen3-0.6b": ("qwen3", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }),
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 1024,
}  # fmt: skip
GROUP = 128


def make_model(architecture: str, settings: dict[str, Any], device: str) -> Any:
    """A causal language model with random bfloat16 weights, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spread = settings["hidden_size"] ** -0.5  # activations keep their size, so that attention matters
    config = AutoConfig.for_model(
        architecture, **settings, initializer_range=spread, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def step_bytes(model: Any, batch: int, context: int) -> int:
    """Bytes that one decode step must read."""
    config = model.config
    tied = config.tie_word_embeddings
    embedding = model.get_input_embeddings().weight
    weights = sum(t.nbytes for t in [*model.parameters(), *int4_tensors(model)] if tied or t is not embedding)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2
    return weights + batch * context * per_token


def int4_tensors(model: Any) -> list[torch.Tensor]:
    return [t for m in model.modules() if isinstance(m, Int4Linear) for t in (m.packed, m.scales_and_zeros)]


class Int4Linear(nn.Module):
    """torch's own weight-only int4 product (asymmetric, groups of 128), rounded to nearest."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        rows, columns = weight.shape
        grouped = weight.view(rows, columns // GROUP, GROUP)
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min(1e-8)
        codes = ((grouped - low) / scale).round().clamp(0, 15)
        middle = low + 8 * scale
        self.dequantized = ((codes - 8) * scale + middle).view(rows, columns).to(linear.weight.dtype)
        codes = codes.view(rows, columns).to(torch.int32)
        pair = torch.stack([scale[..., 0], middle[..., 0]], -1)  # [rows, groups, 2]
        self.scales_and_zeros = pair.transpose(0, 1).contiguous().to(torch.bfloat16)
        if weight.is_cuda:
            nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            self.packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, 8)
            self.product = torch.ops.aten._weight_int4pack_mm
        else:
            self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            self.product = torch.ops.aten._weight_int4pack_mm_for_cpu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.product(x.reshape(-1, x.shape[-1]), self.packed, GROUP, self.scales_and_zeros)
        return out.view(*x.shape[:-1], -1)


def to_int4(model: Any) -> float:
    """Replace the layers' linears in place; returns the worst relative error of a product against its own weights."""
    worst = 0.0
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                new = Int4Linear(child)
                x = torch.randn(5, child.in_features, dtype=torch.bfloat16, device=child.weight.device)
                want = x.float() @ new.dequantized.float().T
                worst = max(worst, float((new(x).float() - want).norm() / want.norm()))
                del new.dequantized
                setattr(module, name, new)
    return worst
