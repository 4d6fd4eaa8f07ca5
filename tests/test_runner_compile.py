"""The compiled and the CUDA-graph runner: the same logits as the eager one, whatever the plan.

Graphs are traced for real but not turned into machine code (dynamo's `eager` backend), and captured steps are called
instead of replayed, so that the structure (sizes, buckets, filler rows, buffers) runs without a compiler or a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import RunError
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.protocols import ModelRunner
from llmopt.runtime.engine.runner import EagerRunner
from llmopt.runtime.engine.runner_compile import CompileRunner
from llmopt.runtime.engine.runner_cudagraph import CudaGraphRunner, bucket_sizes

VOCAB = 97


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(architecture: str = "llama") -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def row(request: int, start: int, count: int, num_logits: int = 1) -> Row:
    """Request r's token at position p is 3 + (7 r + 5 p) % 90; its blocks of 4 are r, r + 10, r + 20 …"""
    tokens = tuple(3 + (7 * request + 5 * p) % 90 for p in range(start, start + count))
    return Row(request, start, tokens, tuple(request + 10 * i for i in range(-(-(start + count) // 4))), num_logits)


PLANS = [
    (row(0, 0, 6, 2), row(1, 0, 3)),
    (row(0, 6, 1), row(1, 3, 1)),
    (row(2, 0, 5, 0),),
    (row(2, 5, 1),),
    (row(0, 7, 1), row(1, 4, 1), row(2, 6, 1)),
    (row(3, 0, 1),),
    (row(3, 1, 4, 4), row(0, 8, 1), row(2, 7, 1, 0)),
    (row(0, 9, 1), row(1, 5, 1), row(2, 8, 1), row(3, 5, 1), row(4, 0, 1)),
]


def assert_like_eager(model: torch.nn.Module, runner: ModelRunner) -> None:
    got = [runner.execute(StepPlan(rows)).clone() for rows in PLANS]
    runner.close()
    eager = EagerRunner(model, block_size=4, num_blocks=40, attention="torch")
    for rows, logits in zip(PLANS, got):
        torch.testing.assert_close(logits, eager.execute(StepPlan(rows)), atol=1e-5, rtol=1e-5)
    eager.close()


OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 40, "attention": "torch"}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_two_graphs_serve_every_plan(architecture: str) -> None:
    import torch._dynamo as dynamo

    dynamo.reset()
    model = tiny(architecture)
    runner = CompileRunner(model, compiler="eager", **OPTIONS)
    with dynamo.config.patch(error_on_recompile=True):
        assert_like_eager(model, runner)


def test_model_that_is_not_one_graph_is_refused() -> None:
    model = tiny("stablelm")
    with pytest.raises(RunError, match="eager runner"):
        CompileRunner(model, compiler="eager", **OPTIONS)
    assert model(torch.tensor([[5]])).logits.shape[-1] == VOCAB, "the refused model must be left as it was"


def test_captured_steps_fill_up_to_their_bucket() -> None:
    model = tiny()
    sizes: list[int] = []

    def capture(function):  # type: ignore[no-untyped-def]
        function()
        sizes.append(len(sizes))
        return function

    runner = CudaGraphRunner(model, max_graph_seqs=4, capture=capture, **OPTIONS)
    assert len(sizes) == len(bucket_sizes(4)) == 3
    replayed = []
    for size, (step, replay) in list(runner._graphs.items()):

        def counting(size=size, replay=replay):  # type: ignore[no-untyped-def]
            replayed.append(size)
            replay()

        runner._graphs[size] = (step, counting)
    assert_like_eager(model, runner)
    assert replayed == [2, 1, 4, 1], "plain decode steps of up to four rows are replayed, others are not"


def test_filler_rows_write_only_the_scratch_block() -> None:
    runner = CudaGraphRunner(tiny(), max_graph_seqs=8, capture=lambda f: f, **OPTIONS)
    for tensor in runner.pool.tensors:
        tensor.fill_(7.0)
    runner.execute(StepPlan((row(0, 0, 1), row(1, 0, 1), row(2, 0, 1))))
    for tensor in runner.pool.tensors:
        touched = (tensor[:, : runner.num_blocks] != 7.0).flatten(3).any(-1).sum(dim=(1, 2))
        assert touched.tolist() == [3, 3]
    runner.close()


def test_without_a_gpu_nothing_is_captured_and_a_note_says_so() -> None:
    runner = CudaGraphRunner(tiny(), **OPTIONS)
    assert any("no CUDA graphs" in note for note in runner.notes)
    assert runner.execute(StepPlan((row(0, 0, 1),))).shape == (1, VOCAB)
    runner.close()


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 256, 700])
def test_bucket_sizes(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
