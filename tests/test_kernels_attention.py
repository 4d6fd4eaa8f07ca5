"""Native paged attention against a float64 reference."""

import pytest
import torch
from llmopt.runtime.kernels import build
from llmopt.runtime.kernels.attention import allocate_kv, equals_torch, matches_torch, paged_attention, write_kv
from llmopt.runtime.kernels.native import get_num_threads, instruction_set, set_num_threads


@pytest.fixture(params=["native", "portable"], autouse=True)
def isa(request, monkeypatch):
    monkeypatch.setenv("LLMOPT_KERNELS_ISA", request.param)
    reason = build.unavailable_reason()
    if reason:
        pytest.skip(reason)
    set_num_threads(1)
    return request.param


def reference(q, k, v, length, scale, window, softcap, sinks, kept):
    """q [n, H, D] are the last n of `length` tokens; k, v [length, Hkv, D]; all float64."""
    n, heads, _ = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position, key = torch.arange(length - n, length)[:, None], torch.arange(length)[None]
    hidden = key > position
    if window:
        hidden |= (key <= position - window) & (key >= kept)
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v)


def run(
    rows,
    dtype,
    heads=6,
    kv_heads=2,
    head_dim=48,
    block_size=32,
    window=0,
    softcap=0.0,
    sinks=None,
    seed=0,
    as_torch=False,
    kept=0,
):
    """rows: (query tokens, length) a sequence. Returns (native, reference), both [tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for _, length in rows]
    order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    k_cache, v_cache = allocate_kv(len(order), block_size, kv_heads, head_dim, dtype)
    tables = torch.full((len(rows), max(blocks)), -1, dtype=torch.int32)
    queries, expected, scale = [], [], head_dim**-0.5
    for r, (count, length) in enumerate(rows):
        mine = torch.tensor([order.pop() for _ in range(blocks[r])])
        tables[r, : len(mine)] = mine
        k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        q = torch.randn(count, heads, head_dim, generator=generator) * 2
        at = torch.arange(length)
        write_kv(k, v, k_cache, v_cache, mine[at // block_size] * block_size + at % block_size)
        queries.append(q)
        expected.append(reference(q.double(), k.double(), v.double(), length, scale, window, softcap, sinks, kept))
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0)
    lengths = torch.tensor([length for _, length in rows])
    out = paged_attention(torch.cat(queries), k_cache, v_cache, starts, lengths, tables, scale=scale, window=window,
                          kept=kept, softcap=softcap, sinks=sinks, as_torch=as_torch)  # fmt: skip
    return out.double(), torch.cat(expected)


MIXED = [(1, 1), (1, 200), (40, 40), (17, 90), (3, 33), (1, 64)]


@pytest.mark.parametrize("options", [
    {}, {"window": 24}, {"softcap": 5.0}, {"sinks": torch.tensor([0.5, -3.0, 4.0, 9.0, 0.0, 1.0])},
    {"window": 50, "softcap": 20.0, "block_size": 64}, {"head_dim": 64, "heads": 9, "kv_heads": 3},
    {"head_dim": 20, "heads": 4, "kv_heads": 4}, {"head_dim": 128, "heads": 8, "kv_heads": 1},
    {"window": 24, "kept": 4}, {"window": 7, "kept": 70}, {"window": 40, "kept": 32, "softcap": 5.0},
])  # fmt: skip
def test_mixed_batch(options):
    out, expected = run(MIXED, torch.float32, **options)
    assert (out - expected).abs().max() < 1e-5
    out, expected = run(MIXED, torch.bfloat16, **options)
    assert (out - expected).abs().max() < 0.03
    assert (out - expected).abs().mean() < 0.002


@pytest.mark.parametrize("options", [
    {}, {"window": 24}, {"softcap": 5.0}, {"sinks": torch.tensor([0.5, -3.0, 4.0, 9.0, 0.0, 1.0])},
    {"head_dim": 128, "heads": 8, "kv_heads": 1}, {"head_dim": 64, "heads": 9, "kv_heads": 3, "block_size": 64},
    {"window": 24, "kept": 4},
])  # fmt: skip
def test_in_the_order_of_torch(options):
    """The arithmetic of torch's attention, whatever else is asked of it: tiles, a row alone, few keys, many spans."""
    out, expected = run([*MIXED, (1, 1300), (33, 600), (200, 200)], torch.bfloat16, as_torch=True, **options)
    assert (out - expected).abs().max() < 0.03
    assert (out - expected).abs().mean() < 0.002


def test_torch_is_matched_where_its_orders_are_known(isa):
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if isa == "portable" or instruction_set() != "avx512-vnni-bf16" or not (2, 11) <= version <= (2, 13):
        pytest.skip("the orders are those of torch 2.11 to 2.13 with AVX-512 BF16")
    matches_torch.cache_clear()
    assert matches_torch()


@pytest.mark.parametrize(("length", "new", "rounds"), [(800, 800, 2), (300, 200, 2), (200, 1, 20), (1000, 1, 40)])
def test_the_bits_of_torch(isa, length, new, rounds):
    """Many values, since a sum in a wrong order shows in one bfloat16 of a hundred thousand."""
    if isa == "portable" or not matches_torch():
        pytest.skip("the portable kernels, or a machine where torch sums in other orders")
    generator = torch.Generator().manual_seed(1)
    assert all(equals_torch(length, new, generator, heads=18, kv_heads=6) for _ in range(rounds))


@pytest.mark.parametrize("rows", [[(1, 2000)], [(2, 1500), (1, 3)], [(70, 700)]])
def test_long_contexts_are_split_and_merged(rows):
    before = get_num_threads()
    set_num_threads(3)
    try:
        for sinks in (None, torch.linspace(-2, 6, 6)):
            out, expected = run(rows, torch.float32, sinks=sinks)
            assert (out - expected).abs().max() < 1e-5
        for options in ({"window": 333}, {"window": 600, "kept": 5}, {"window": 300, "kept": 300}):
            out, expected = run(rows, torch.float32, **options)
            assert (out - expected).abs().max() < 1e-5
    finally:
        set_num_threads(before)


def test_bad_input_is_one_clear_error():
    with pytest.raises(ValueError, match="multiple of 32"):
        allocate_kv(4, 16, 1, 64, torch.float32)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        allocate_kv(4, 32, 1, 64, torch.float16)
    k_cache, v_cache = allocate_kv(2, 32, 1, 32, torch.float32)
    k = torch.zeros(1, 1, 32)
    with pytest.raises(ValueError, match="slots"):
        write_kv(k, k, k_cache, v_cache, torch.tensor([64]))
    with pytest.raises(ValueError, match="blocks must lie"):
        paged_attention(k, k_cache, v_cache, torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[2]]), scale=1.0)
    with pytest.raises(ValueError, match="lengths"):
        paged_attention(k, k_cache, v_cache, torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([[0]]), scale=1.0)
