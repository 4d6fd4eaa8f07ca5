"""Every architecture, as a tiny random model: a mixed schedule gives the logits of transformers' eager attention.

The schedule has chunked prefill, decode, verification rows, a request preempted and recomputed in other blocks, and one
that starts on another's prefix; small blocks, shuffled tables with holes, rows in changing order. The reference is
transformers' own forward with eager attention, one request at a time, in float32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from llmopt.optimizer.errors import RunError
from llmopt.runtime.attention.probe import unsupported_reason
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.runner import EagerRunner

VOCAB = 97
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
MHA = {**BASE, "num_key_value_heads": 4}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
MLA = {
    **MHA,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "topk_method": "greedy",
}

ARCHITECTURES: dict[str, dict] = {
    "afmoe": {**BASE, **MOE, "head_dim": 8},
    "apertus": BASE,
    "arcee": BASE,
    "bitnet": BASE,
    "codegen": {**GPT, "rotary_dim": 4},
    "cohere": BASE,
    "cohere2": {**BASE, **SLIDING},
    "cwm": {**BASE, "head_dim": 8},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "dots1": {**MHA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
              "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5": BASE,
    "ernie4_5_moe": {**BASE, **MOE},
    "exaone4": {**BASE, **SLIDING},
    "gemma": {**BASE, "head_dim": 8},
    "gemma2": {**BASE, **SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**BASE, **SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8},
    "glm": {**BASE, "head_dim": 8},
    "glm4": {**BASE, "head_dim": 8},
    "glm4_moe": {**BASE, **MOE, "head_dim": 8},
    "glm4_moe_lite": MLA,
    "gpt2": GPT,
    "gpt_bigcode": {**GPT, "multi_query": True},
    "gpt_neox": MHA,
    "gpt_oss": {**BASE, **SLIDING, **MOE, "head_dim": 8},
    "gptj": {**GPT, "rotary_dim": 4},
    "granite": {**BASE, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "granitemoe": {**BASE, **MOE},
    "granitemoeshared": {**BASE, **MOE},
    "helium": {**BASE, "head_dim": 8},
    "hunyuan_v1_dense": {**BASE, "head_dim": 8},
    "hunyuan_v1_moe": {**BASE, **MOE, "head_dim": 8},
    "jetmoe": {**BASE, **MOE, "head_dim": 8},
    "llama": BASE,
    "llama4_text": {**BASE, **MOE, "head_dim": 8, "attention_chunk_size": 6, "intermediate_size_mlp": 48,
                    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
                    "attn_temperature_tuning": True, "floor_scale": 4, "moe_layers": [1]},
    "mimo_v2_flash": {**BASE, **MOE, "head_dim": 8},
    "minicpm3": {**MLA, "num_key_value_heads": 4},
    "minimax_m2": {**BASE, **MOE, "head_dim": 8},
    "ministral": {**BASE, **SLIDING, "head_dim": 8},
    "mistral": {**BASE, "sliding_window": 5, "head_dim": 8},
    "mixtral": {**BASE, **MOE, "sliding_window": None},
    "nanochat": {**BASE, "head_dim": 8},
    "nemotron": BASE,
    "olmo": BASE,
    "olmo2": BASE,
    "olmo3": {**BASE, **SLIDING},
    "olmoe": {**BASE, **MOE},
    "opt": {**MHA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": MHA,
    "phi": BASE,
    "phi3": {**BASE, "sliding_window": 5},
    "phimoe": {**BASE, **MOE, "sliding_window": 5},
    "qwen2": BASE,
    "qwen2_moe": {**BASE, **MOE, "shared_expert_intermediate_size": 24},
    "qwen3": {**BASE, "head_dim": 8},
    "qwen3_moe": {**BASE, **MOE, "head_dim": 8},
    "seed_oss": {**BASE, "head_dim": 8},
    "smollm3": BASE,
    "solar_open": {**BASE, **MOE, "head_dim": 8},
    "stablelm": BASE,
    "starcoder2": {**BASE, "sliding_window": 5},
    "vaultgemma": {**BASE, **SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8},
    "youtu": MLA,
}  # fmt: skip

NEW_TO_THE_INTERFACE = {"codegen", "gptj"}

REFUSED: dict[str, dict] = {
    "bloom": {**GPT, "hidden_size": 32},
    "falcon": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "falcon_mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "gpt_neo": {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, 
                "attention_types": [[["global", "local"], 1]]},
    "lfm2": {**BASE, "layer_types": ["conv", "full_attention"]},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2},
    "qwen3_next": {**BASE, **MOE, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {**BASE, "num_hidden_layers": 3, "lru_width": 32, "head_dim": 8},
    "rwkv": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(architecture: str, settings: dict) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(architecture, **settings)
    except ValueError:
        pytest.skip(f"this transformers has no {architecture}")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():  # every parameter counts: zero biases would hide a fault
        if parameter.ndim == 1:
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            with torch.no_grad():
                parameter.add_(noise) if "norm" in name else parameter.copy_(noise)
    return model


class Schedule:
    """Runs rows by hand and keeps every logit that comes out, by request and position."""

    def __init__(self, runner: EagerRunner, seed: int = 0) -> None:
        self.runner, self.random = runner, random.Random(seed)
        self.free = list(range(runner.num_blocks))
        self.random.shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def row(self, request: int, start: int, count: int, num_logits: int) -> Row:
        table = self.tables.setdefault(request, [])
        while len(table) * self.runner.block_size < start + count:
            table.append(self.free.pop())
        tokens = tuple(self.texts[request][start : start + count])
        return Row(request, start, tokens, tuple(table), num_logits)

    def step(self, *spans: tuple[int, int, int, int]) -> None:
        """Each span is (request, start, tokens, num_logits)."""
        rows = [self.row(*span) for span in spans]
        out = self.runner.execute(StepPlan(tuple(rows)))
        assert out.dtype == torch.float32 and out.shape == (sum(r.num_logits for r in rows), self.runner.vocab_size)
        at = 0
        for row in rows:
            for i in range(row.num_logits):
                self.logits[row.request_id, row.end - row.num_logits + i] = out[at].clone()
                at += 1

    def preempt(self, request: int) -> None:
        """Its blocks go back, and are overwritten by others before it is recomputed."""
        self.free = self.tables.pop(request) + self.free
        self.random.shuffle(self.free)


def mixed_schedule(schedule: Schedule) -> None:
    """Four requests: 0 long and chunked, 1 preempted, 2 on the first eight tokens of 0, 3 short."""
    schedule.step((0, 0, 7, 0))
    schedule.step((1, 0, 10, 1), (0, 7, 6, 1))
    schedule.step((0, 13, 1, 1), (3, 0, 1, 1), (1, 10, 1, 1))
    schedule.preempt(1)
    whole_blocks = 8 // schedule.runner.block_size
    schedule.tables[2] = schedule.tables[0][:whole_blocks]
    start = whole_blocks * schedule.runner.block_size
    schedule.step((2, start, 17 - start, 2), (3, 1, 1, 1), (0, 14, 1, 1))
    schedule.step((1, 0, 5, 0), (0, 15, 4, 4), (2, 17, 1, 1))
    schedule.step((3, 2, 1, 1), (0, 19, 1, 1), (2, 18, 1, 1), (1, 5, 8, 3))
    schedule.step((1, 13, 1, 1), (3, 3, 1, 1), (0, 20, 1, 1), (2, 19, 1, 1))


def compare(model: torch.nn.Module, runner: EagerRunner) -> float:
    """Largest difference of any logit of the mixed schedule from eager attention, one request at a time."""
    generator = torch.Generator().manual_seed(2)
    schedule = Schedule(runner)
    for request, length in enumerate((21, 14, 20, 4)):
        schedule.texts[request] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    schedule.texts[2][:8] = schedule.texts[0][:8]
    mixed_schedule(schedule)
    runner.close()
    assert len(schedule.logits) == 23
    model.set_attn_implementation("eager")
    worst = 0.0
    for request, text in schedule.texts.items():
        with torch.no_grad():
            want = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        assert want.std() > 0.01, "the model says nothing: the comparison would be empty"
        for (owner, position), got in schedule.logits.items():
            if owner == request:
                worst = max(worst, float((got - want[position]).abs().max() / want.abs().max().clamp_min(1)))
    return worst


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_mixed_schedule_equals_eager(architecture: str) -> None:
    import transformers

    model = tiny(architecture, ARCHITECTURES[architecture])
    if architecture in NEW_TO_THE_INTERFACE and transformers.__version__ < "5.24" and unsupported_reason(model):
        pytest.skip("this transformers does not have it in AttentionInterface yet, and it is refused")
    runner = EagerRunner(model, block_size=4, num_blocks=24)
    assert runner.self_check_error is not None and runner.self_check_error < 1e-4
    assert compare(model, runner) < 1e-5


@pytest.mark.parametrize("architecture", sorted(REFUSED))
def test_unsupported_architectures_are_refused(architecture: str) -> None:
    model = tiny(architecture, REFUSED[architecture])
    assert unsupported_reason(model)
    with pytest.raises(RunError, match="static-batch"):
        EagerRunner(model, num_blocks=8)
