"""`method: auto`: the knapsack, the sensitivities and the estimates, held against brute force."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.optimizer.model import LoadedModel
from llmopt.passes.quantize.apply import energy
from llmopt.passes.quantize.auto.estimate import Inputs, row_errors
from llmopt.passes.quantize.auto.knapsack import Knapsack, Option
from llmopt.passes.quantize.auto.sensitivity import SharedInput, fisher_vector, measure
from llmopt.passes.quantize.config import Config
from llmopt.passes.quantize.gptq import quantize_gptq
from llmopt.passes.quantize.rtn import quantize_rtn
from llmopt.runtime.kernels.packed import QuantScheme
from llmopt.tests.test_quantize_auto import Tokens, make

# the knapsack


def problems(count: int, units: int = 4) -> list[list[list[Option]]]:
    random.seed(3)
    found = []
    for number in range(count):
        step = (1, 64, 1000)[number % 3]
        found.append(
            [
                [
                    Option(
                        step * random.randint(1, 40),
                        random.choice([0.0, 0.5, random.random() * 10 ** -random.randint(0, 3)]),
                    )
                    for _ in range(random.randint(1, 4))
                ]
                for _ in range(random.randint(1, units))
            ]
        )
    return found


def solutions(units: list[list[Option]]) -> list[tuple[int, float]]:
    """Size and error of every solution."""
    return [
        (sum(option.size for option in picked), sum(option.error for option in picked))
        for picked in itertools.product(*units)
    ]


def test_the_knapsack_finds_what_brute_force_finds() -> None:
    for units in problems(120):
        knapsack, every = Knapsack(units), solutions(units)
        smallest = min(size for size, _ in every)
        assert knapsack.smallest == smallest and knapsack.least_error(smallest - 1) is None
        for budget in {size + extra for size, _ in every[:6] for extra in (0, 3)}:
            choice = knapsack.least_error(budget)
            expected = min((error for size, error in every if size <= budget), default=None)
            assert (choice is None) == (expected is None)
            if choice is not None:
                assert knapsack.size(choice) <= budget
                assert knapsack.error(choice) == pytest.approx(expected, abs=1e-12)
        for limit in {error * share for _, error in every[:6] for share in (1.0001, 0.5)}:
            choice = knapsack.least_size(limit)
            fitting = [size for size, error in every if error <= limit]
            assert (choice is None) == (not fitting)
            if choice is not None:
                assert knapsack.size(choice) == min(fitting) and knapsack.error(choice) <= limit


def test_coarse_sizes_never_exceed_the_budget_and_stay_near_the_optimum() -> None:
    random.seed(5)
    for _ in range(20):
        units = [
            [Option(size := 997 * bits * width, 4.0**-bits * width * weight) for bits in range(2, 9)]
            for width, weight in ((random.randint(50, 900), random.random()) for _ in range(12))
        ]
        exact, coarse = Knapsack(units), Knapsack(units, limit=200)
        assert coarse.grain > exact.grain >= 1 and size
        budget = int(exact.smallest * 1.7)
        best, found = exact.least_error(budget), coarse.least_error(budget)
        assert best is not None and found is not None and coarse.size(found) <= budget
        assert exact.error(best) <= coarse.error(found) * (1 + 1e-9) <= 1.2 * exact.error(best)
        assert coarse.least_error(exact.smallest) is not None


# sensitivities


def test_the_random_vector_has_the_fisher_matrix_as_covariance() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5) * 2
    p = torch.softmax(logits, 0)
    vectors = fisher_vector(logits.expand(200_000, 5), torch.Generator().manual_seed(1))
    covariance = vectors.t() @ vectors / len(vectors)
    torch.testing.assert_close(covariance, torch.diag(p) - p[:, None] * p, atol=3e-3, rtol=0)
    assert float(vectors.mean(0).abs().max()) < 5e-3


def gather(model: LoadedModel, names: list[str], folder: Path | None = None) -> dict[str, tuple[SharedInput, Any]]:
    found: dict[str, tuple[SharedInput, Any]] = {}

    def visit(groups: list[SharedInput]) -> None:
        for group in groups:
            found.update({name: (group, output) for name, output in group.outputs.items()})

    measure(model, names, Tokens().batches(), 7, folder, visit, lambda step, total: None)
    return found


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_block_by_block_gradients_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    more = {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64} if kind == "opt" else {}
    model, info = make(kind, **more)
    names = list(info.linear_shapes)
    found = gather(model, names)
    assert set(found) == set(names)

    squares = {name: torch.zeros(rows) for name, (rows, _) in info.linear_shapes.items()}
    inner = next(name for name in names if name.endswith("1.fc2") or name.endswith("1.mlp.down_proj"))
    weighted, weight = torch.zeros(()), torch.zeros(())
    generator = torch.Generator().manual_seed(7)
    for ids in Tokens().batches():
        seen: dict[str, list[torch.Tensor]] = {}

        def hook(module: Any, args: Any, output: torch.Tensor, name: str = "", seen: Any = seen) -> None:
            output.retain_grad()
            seen[name] = [args[0], output]

        handles = [
            model.module.get_submodule(n).register_forward_hook(lambda m, a, o, n=n, hook=hook: hook(m, a, o, n))
            for n in names
        ]
        logits = model.module(ids, use_cache=False).logits
        logits.backward(fisher_vector(logits.detach(), generator))
        for handle in handles:
            handle.remove()
        for name, (_, output) in seen.items():
            squares[name] += output.grad.reshape(-1, output.shape[-1]).square().sum(0)
        x, g = seen[inner][0].detach().reshape(-1, 96), seen[inner][1].grad.reshape(-1, 64).square().sum(1)
        weighted, weight = weighted + (x * g[:, None]).t() @ x, weight + g.sum()
    total = 2 * sum(ids.numel() for ids in Tokens().batches())
    for name in names:
        torch.testing.assert_close(found[name][1], squares[name] / total, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(found[inner][0].inputs.metric, weighted / weight, rtol=1e-3, atol=1e-5)
    assert all(p.grad is None for p in make(kind, **more)[0].module.parameters())

    (tmp_path / "states").mkdir()
    again = gather(model, names, tmp_path / "states")
    assert all(torch.equal(again[name][1], found[name][1]) for name in names)
    assert not list((tmp_path / "states").iterdir())


def correlated(rows: int = 96, columns: int = 64) -> tuple[torch.Tensor, Inputs]:
    torch.manual_seed(0)
    x = torch.randn(4096, columns) @ (torch.randn(columns, columns) / 8 + torch.eye(columns))
    weights = torch.rand(4096, 1) ** 4
    metric = (x * weights).t() @ x / weights.sum()
    return torch.randn(rows, columns), Inputs(x.t() @ x / len(x), metric)


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_the_estimate_for_gptq_is_near_what_gptq_does(bits: int) -> None:
    weight, inputs = correlated()
    config, scheme = Config(method="gptq", group_size=32), QuantScheme(bits, 32)
    (rows,) = row_errors("gptq", [weight], scheme, inputs, config)
    result = quantize_gptq(weight, inputs.hessian, scheme, torch.float32, search_steps=config.scale_search)
    error = weight - result.quantized.dequantize(bits)
    assert 0.75 < float(rows.sum()) / float(energy(error, inputs.metric).sum()) < 1.1
    nearest = row_errors("rtn", [weight], scheme, inputs, config)[0]
    error = weight - quantize_rtn(weight, scheme, torch.float32, config.scale_search).dequantize(bits)
    torch.testing.assert_close(nearest, energy(error, inputs.metric))
    assert float(rows.sum()) < float(nearest.sum())
    (scaled,) = row_errors("awq", [weight], scheme, inputs, Config(method="awq", group_size=32))
    assert 0 < float(scaled.sum()) < float(nearest.sum()) * 1.05


# limits
