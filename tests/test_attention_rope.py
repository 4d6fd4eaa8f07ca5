"""Rotary embeddings that look at the whole batch are held at their original frequencies, and bound the length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from llmopt.optimizer.errors import UsageError
from llmopt.runtime.attention.rope import rope_limit
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.runner import EagerRunner

BASE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(kind: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if kind == "longrope":
        config = AutoConfig.for_model(
            "phi3",
            **BASE,
            max_position_embeddings=128,
            original_max_position_embeddings=32,
            rope_parameters=LONG,
            eos_token_id=2,
        )
    elif kind == "dynamic":
        config = AutoConfig.for_model("llama", **BASE, max_position_embeddings=32, rope_parameters=DYNAMIC)
    else:
        config = AutoConfig.for_model("llama", **BASE, max_position_embeddings=128)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_length_is_bounded_and_frequencies_hold(kind: str) -> None:
    net = model(kind)
    assert rope_limit(net) == (32, kind)
    with pytest.raises(UsageError, match="32"):
        EagerRunner(net, block_size=4, num_blocks=16, max_model_len=33)
    ids = torch.randint(1, 97, (1, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = net(ids, use_cache=False).logits[0]
    # A long forward outside of the engine leaves other frequencies behind.
    with torch.no_grad():
        net(torch.ones(1, 60, dtype=torch.long), use_cache=False)
    runner = EagerRunner(net, block_size=4, num_blocks=16)
    assert runner.max_model_len == 32
    if kind == "longrope":
        assert any("longrope" in note for note in runner.notes)
    tokens = ids[0].tolist()
    first = runner.execute(StepPlan((Row(0, 0, tuple(tokens[:20]), (3, 1, 0, 7, 5), 20),)))
    second = runner.execute(
        StepPlan((Row(1, 0, (5, 6), (2,), 0), Row(0, 20, tuple(tokens[20:]), (3, 1, 0, 7, 5, 9, 8, 10), 12)))
    )
    torch.testing.assert_close(torch.cat([first, second]), want, atol=2e-5, rtol=1e-4)
    runner.close()
    kinds = {m.rope_type for m in net.modules() if hasattr(m, "rope_type")}
    assert kinds == {kind}, "close() must give the model its own rotary embedding back"


def test_plain_rope_is_not_bounded() -> None:
    net = model("plain")
    assert rope_limit(net) is None
    runner = EagerRunner(net, block_size=4, num_blocks=16)
    assert runner.max_model_len == 128
    runner.close()
