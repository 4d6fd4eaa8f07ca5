"""Products of 16-bit matrices in float32: rounded once, in parts, with gradients; and what leaves them alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from llmopt.runtime.kernels import wide_products as module
from llmopt.runtime.kernels.wide_products import WideProducts, slow_dtypes, wide_products
from torch import nn

HALVES = [torch.bfloat16, torch.float16]


def make(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_are_rounded_once(dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 5 outputs and 7 rows, too: the sums of an output are one row's, whatever the parts."""
    x, weight = make(3, 9, 48, dtype=dtype), make(33, 48, seed=1, dtype=dtype)
    b = make(33, seed=2, dtype=dtype) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    for parts in (None, (5 * 48, 7)):
        if parts is not None:
            monkeypatch.setattr(module, "WEIGHT_PART", parts[0])
            monkeypatch.setattr(module, "TOKEN_PART", parts[1])
        with torch.no_grad(), WideProducts([dtype]):
            found = F.linear(x, weight, b)
        assert found.dtype == dtype and found.shape == (3, 9, 33)
        half_a_step = torch.finfo(dtype).eps / 2 * exact.abs()
        assert bool(((found.double() - exact).abs() <= half_a_step * 1.01 + 1e-5).all())


@pytest.mark.parametrize("dtype", HALVES)
def test_products_and_attention_are_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (make(2, 3, 12, 16, seed=s, dtype=dtype) for s in range(3))
    mask = torch.zeros(12, 12, dtype=dtype).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -1e4)
    with WideProducts([dtype]):
        products = q @ k.transpose(2, 3), torch.matmul(q, k.transpose(2, 3)), torch.bmm(q[0], k[0].transpose(1, 2))
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    wide = q.double() @ k.double().transpose(2, 3)
    for found, exact in zip((*products,), (wide, wide, wide[0])):
        torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask.double())
    torch.testing.assert_close(attention, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_gradients_are_those_of_float32_layers() -> None:
    layer, x = nn.Linear(32, 24).to(torch.bfloat16), make(20, 32)
    reference, wide = nn.Linear(32, 24), x.float().requires_grad_()
    reference.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    x.requires_grad_()
    with WideProducts([torch.bfloat16]):
        layer(x).float().square().sum().backward()
    y = reference(wide)
    (y * (2 * y.detach().bfloat16().float())).sum().backward()  # through the rounded output
    for found, exact in ((x, wide), (layer.weight, reference.weight), (layer.bias, reference.bias)):
        assert found.grad.dtype == torch.bfloat16
        torch.testing.assert_close(found.grad.float(), exact.grad, rtol=0.02, atol=0.02)


def test_other_dtypes_meta_tensors_and_few_rows_are_left_alone() -> None:
    x, weight = make(module.FEW - 1, 48), make(33, 48, seed=1)
    plain = F.linear(x, weight)
    with WideProducts([torch.bfloat16]):
        assert torch.equal(F.linear(x, weight), plain)
        assert F.linear(make(20, 48).to("meta"), weight.to("meta")).is_meta
        many = make(20, 48, dtype=torch.float32)
        assert torch.equal(F.linear(many, weight.float()), many @ weight.float().t())


@pytest.mark.parametrize("dtype", HALVES)
def test_mixtures_of_dtypes_stay_errors(dtype: torch.dtype) -> None:
    x, weight = make(20, 48, dtype=dtype), make(33, 48, seed=1, dtype=dtype)
    wrong = (
        lambda: F.linear(x, weight.float()),
        lambda: F.linear(x, weight, torch.zeros(33)),
        lambda: x @ weight.float().t(),
        lambda: F.scaled_dot_product_attention(x, x.float(), x),
    )
    for product in wrong:
        with pytest.raises(RuntimeError, match="dtype"), WideProducts([dtype]):
            product()
    with WideProducts([dtype]):
        assert F.linear(x, weight, torch.zeros((), dtype=dtype)).shape == (20, 33)


def test_only_processors_without_the_instructions_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def dtypes(machine: str, *flags: str) -> frozenset[torch.dtype]:
        monkeypatch.setattr(module.platform, "machine", lambda: machine)
        monkeypatch.setattr(module, "_any_flag", lambda *names: any(name in flags for name in names))
        monkeypatch.setattr(module, "_float16_products", lambda: False)
        return slow_dtypes.__wrapped__()

    assert dtypes("x86_64") == {torch.bfloat16, torch.float16}
    assert dtypes("AMD64", "_is_avx512_bf16_supported") == {torch.float16}
    assert dtypes("x86_64", "_is_amx_tile_supported", "_is_amx_fp16_supported") == frozenset()
    assert dtypes("aarch64") == frozenset()
    monkeypatch.undo()
    assert slow_dtypes() <= {torch.bfloat16, torch.float16}
    with wide_products("cuda") as mode:
        assert mode is None
