"""Quantized keys and values: the definition, and every backend against the float64 reference over what was stored."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.attention.layer import AttentionLayer, Batch
from llmopt.runtime.attention.op import cache_writer, paged_backend
from llmopt.runtime.attention.pool import KVPool, block_bytes, bytes_per_block, group_layers
from llmopt.runtime.attention.select import choose, refusal
from llmopt.runtime.kernels.kv_format import (
    FORMATS,
    cache_dtype,
    cache_dtype_name,
    dequantize,
    format_of,
    quantize,
    rotate,
    split,
    turn_back,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
BACKENDS = ["triton"] if INTERPRETED else ["torch", "compiled"]
ERRORS = {"int8": 0.01, "fp8_e4m3": 0.04, "int4": 0.17}
"""Most relative error of a stored random vector, by format."""


@pytest.fixture(params=list(FORMATS))
def fmt(request):
    return FORMATS[request.param]


@pytest.fixture(params=[name for name, f in FORMATS.items() if not f.by_channel])
def token_fmt(request):
    """Formats whose keys are quantized token by token; the other has its tests in test_kv_channels.py."""
    return FORMATS[request.param]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layer(heads: int = 6, kv_heads: int = 2, dim: int = 32, **more) -> AttentionLayer:
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "key_dim": dim, "value_dim": dim}
    return AttentionLayer(layer_idx=0, **shape, cache_heads=kv_heads, cache_key_dim=dim, cache_value_dim=dim, **more)


def stored(x: torch.Tensor, fmt) -> torch.Tensor:
    """What a cache would give back of x, float64."""
    return turn_back(dequantize(*quantize(x, fmt), fmt).double(), fmt)


# -- the definition


def test_rotation_is_a_hadamard_matrix():
    x = torch.randn(3, 48, dtype=torch.float64)
    turned, block = rotate(x)
    assert block == 16
    torch.testing.assert_close(turned.square().sum(-1), block * x.square().sum(-1))
    torch.testing.assert_close(rotate(turned)[0] / block, x)
    matrix, _ = rotate(torch.eye(16))
    assert matrix.abs().eq(1).all() and torch.equal(matrix @ matrix.T, 16 * torch.eye(16))


def test_error_of_a_format(fmt):
    x = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(0)) * 7
    error = (stored(x, fmt) - x).norm(dim=-1) / x.norm(dim=-1)
    assert 0 < error.max() < ERRORS[fmt.name]
    x[..., 5] *= 50  # one large channel, as keys have them
    assert ((stored(x, fmt) - x).norm() / x.norm()) < max(0.03, ERRORS[fmt.name])


def test_int8_by_hand():
    codes, scale = quantize(torch.tensor([[127.0, -127.0, 63.4, 0.5, 1.5]]), FORMATS["int8"])
    assert codes.view(torch.int8).tolist() == [[127, -127, 63, 0, 2]] and scale.tolist() == [1.0]


def test_int4_by_hand():
    """A rotated unit vector is constant: 1 / (1 / 7.5) falls onto the highest code."""
    codes, scale = quantize(torch.eye(8)[:1], FORMATS["int4"])
    assert scale.item() == torch.tensor(1 / 7.5).bfloat16().item()
    assert codes.tolist() == [[0xFF] * 4]
    assert turn_back(dequantize(codes, scale, FORMATS["int4"]), FORMATS["int4"])[0, 0] == pytest.approx(1, rel=4e-3)


def test_zeros_and_what_is_not_finite(fmt):
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 0] = torch.inf, torch.nan
    x[3] = 1e-3
    codes, scale = quantize(x, fmt)
    back = stored(x, fmt)
    assert back[0].eq(0).all() and scale.isnan().tolist() == [False, True, True, False]
    if fmt.name != "int4":  # whose sixteen values are all but zero, and a rotated constant is one large number
        torch.testing.assert_close(back[3], x[3].double(), rtol=5e-3, atol=1e-9)
    assert codes.dtype == torch.uint8


def test_bytes(fmt):
    """Scales count: int8 holds at least 1.9 and int4 3.5 times the tokens of bfloat16 from 64 elements a head on."""
    wanted = {"int8": 1.9, "fp8_e4m3": 1.9, "int4": 3.5}[fmt.name]
    for dim in (64, 80, 128, 256):
        assert fmt.dim_of(fmt.vector_bytes(dim)) == dim
        assert -(-block_bytes(group_layers([layer(dim=dim)]), 32, fmt.dtype) // 64) == fmt.token_bytes(dim)
        one = group_layers([layer(dim=dim)])
        assert bytes_per_block(one, 32, 2) / block_bytes(one, 32, fmt.dtype) >= wanted
        pool = KVPool(one, 3, 32, fmt.dtype, "cpu")
        assert pool.nbytes == 4 * block_bytes(one, 32, fmt.dtype)


def test_split_views_cover_the_block(fmt):
    pool = KVPool(group_layers([layer()]), 2, 16, fmt.dtype, "cpu")
    codes, scales = split(pool.tensors[1][0], fmt)
    codes.fill_(0xFF)
    scales.view(torch.int16).fill_(-1)
    assert pool.tensors[1][0].view(torch.uint8).eq(0xFF).all()


def test_names():
    assert cache_dtype("auto", torch.float16) == torch.float16
    assert cache_dtype("int4", torch.float16) == torch.uint8 and cache_dtype_name(torch.uint8) == "int4"
    assert cache_dtype_name(torch.bfloat16) == "bfloat16" and format_of(torch.bfloat16) is None
    with pytest.raises(UsageError, match="int8"):
        cache_dtype("int9", torch.float32)


# -- backends

ROWS = {
    "decode": [(1, 0), (1, 5), (1, 40), (1, 15), (1, 300)],
    "mixed": [(7, 0), (1, 12), (3, 33), (1, 0), (70, 64)],
}


def make(fmt, backend: str, rows: str, dim: int = 32, size: int = 32, heads: int = 6, kv_heads: int = 2):
    """A pool written through the backend with outlying channels and very unequal tokens, tables shuffled, free blocks
    full of other numbers. Returns (query, caches, stored keys, stored values, batch); the latter are plain caches."""
    g = torch.Generator().manual_seed(3)
    spans = ROWS[rows]
    lengths = [new + old for new, old in spans]
    blocks = [-(-n // size) for n in lengths]
    count = sum(blocks) + 3
    order = torch.randperm(count, generator=g).tolist()
    tables = torch.zeros(len(spans), max(blocks), dtype=torch.int32)
    slots: list[int] = []
    for i, (new, old) in enumerate(spans):
        mine = [order.pop() for _ in range(blocks[i])]
        tables[i, : blocks[i]] = torch.tensor(mine)
        slots += [mine[p // size] * size + p % size for p in range(old, old + new)]
    bounds = torch.tensor([0, *(new for new, _ in spans)]).cumsum(0).int()
    keys, values = torch.randn(2, count * size, kv_heads, dim, generator=g)
    keys[..., 3] *= 6
    values *= torch.logspace(-1, 1, count * size)[torch.randperm(count * size, generator=g), None, None]
    pool = KVPool(group_layers([layer(heads, kv_heads, dim)]), count - 1, size, fmt.dtype, "cpu", backend)
    caches = tuple(t[0] for t in pool.tensors)
    for slots_of_all in (torch.randperm(count * size, generator=g), torch.arange(count * size)):  # overwrites all of it
        cache_writer(backend)(keys, values, *caches, Batch(slots_of_all, bounds, bounds, tables, 1, 1))
    query = torch.randn(int(bounds[-1]), heads, dim, generator=g)
    batch = Batch(
        torch.tensor(slots), bounds, torch.tensor(lengths).int(), tables, max(n for n, _ in spans), max(lengths)
    )
    plain = tuple(stored(x, fmt).unflatten(0, (count, size)) for x in (keys, values))
    return query, caches, plain, batch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("option", ["plain", "window", "softcap", "sinks"])
def test_backend_equals_reference_over_the_stored_values(backend, rows, option, token_fmt):
    if INTERPRETED and (rows, option) not in {("decode", "plain"), ("mixed", "sinks")}:
        pytest.skip("the interpreter is slow")
    query, caches, plain, batch = make(token_fmt, backend, rows)
    options = {"scale": 0.2, **{"window": {"window": 9}, "softcap": {"softcap": 2.0}}.get(option, {})}
    if option == "sinks":
        options["sinks"] = torch.linspace(-1, 2, 6)
    want = paged_backend("reference")(query.double(), *plain, batch, **options)
    got = paged_backend(backend)(query, *caches, batch, **options)
    assert got.shape == want.shape and got.dtype == query.dtype
    tolerance = 2e-5 if backend != "compiled" else 0.02  # the native kernels round to bfloat16 on the way
    assert ((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max() < tolerance


@pytest.mark.skipif(INTERPRETED, reason="needs no triton")
def test_reference_reads_quantized_caches(token_fmt):
    query, caches, plain, batch = make(token_fmt, "torch", "mixed", dim=12, size=5)
    want = paged_backend("reference")(query.double(), *plain, batch, scale=0.3)
    got = paged_backend("reference")(query.double(), *caches, batch, scale=0.3)
    torch.testing.assert_close(got, want)


@pytest.mark.skipif(INTERPRETED, reason="needs no triton")
@pytest.mark.parametrize("isa", ["native", "portable"])
@pytest.mark.parametrize("dim", [20, 64, 128])
def test_native_codes_are_those_of_the_definition(token_fmt, isa, dim, monkeypatch):
    """To the bit: through the native cache's layout, identity attention gives each stored value back."""
    from llmopt.runtime.kernels import build
    from llmopt.runtime.kernels.attention import allocate_kv, write_kv

    monkeypatch.setenv("LLMOPT_KERNELS_ISA", isa)
    if build.unavailable_reason():
        pytest.skip(build.unavailable_reason())
    size, heads = 32, 2
    g = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2 * size, heads, dim, generator=g) * torch.logspace(-3, 3, 2 * size)[:, None, None]
    keys, values = allocate_kv(2, size, heads, dim, token_fmt.dtype)
    write_kv(k, v, keys, values, torch.arange(2 * size).flip(0))
    padded = -(-dim // 32) * 32
    for x, cache, by_token in ((k, keys, False), (v, values, True)):
        codes, scales = quantize(x.flip(0), token_fmt)
        width = padded * token_fmt.bits // 8 * size
        flat = cache.view(torch.uint8).reshape(2, heads, -1)
        got = flat[..., width:].contiguous().view(torch.bfloat16)
        assert torch.equal(got, scales.view(2, size, heads).transpose(1, 2))
        assert torch.equal(unpack(flat[..., :width], token_fmt, size, padded, by_token)[..., :dim],
                           whole(codes, token_fmt).view(2, size, heads, dim).transpose(1, 2))  # fmt: skip


def whole(codes: torch.Tensor, fmt) -> torch.Tensor:
    """A byte for each code."""
    return codes if fmt.bits == 8 else torch.cat((codes & 15, codes >> 4), -1)


def unpack(flat: torch.Tensor, fmt, size: int, dim: int, by_token: bool) -> torch.Tensor:
    """Codes [N, H, size, dim], a byte each, from a head's bytes [N, H, …] as attention_codes.h lays them out."""
    lead = flat.shape[:2]
    if fmt.bits == 8 and not by_token:
        return flat.reshape(*lead, dim // 2, size, 2).permute(0, 1, 3, 2, 4).reshape(*lead, size, dim)
    if fmt.bits == 8:
        return flat.reshape(*lead, size // 2, dim, 2).permute(0, 1, 2, 4, 3).reshape(*lead, size, dim)
    if not by_token:  # bytes of a lane: dims (0, 2), (4, 6), (1, 3), (5, 7)
        lanes = flat.reshape(*lead, dim // 8, size, 4)
        parts = torch.stack((lanes & 15, lanes >> 4), -1).flatten(-2)[..., [0, 4, 1, 5, 2, 6, 3, 7]]
        return parts.permute(0, 1, 3, 2, 4).reshape(*lead, size, dim)
    lanes = flat.reshape(*lead, size // 4, dim // 32, 16, 4)[..., [0, 2, 1, 3]]
    parts = torch.stack((lanes & 15, lanes >> 4), -3)  # [..., chunk, half, lane, token]
    return parts.permute(0, 1, 2, 6, 3, 4, 5).reshape(*lead, size, dim)


@pytest.mark.skipif(INTERPRETED, reason="needs no triton")
def test_native_rows_do_not_depend_on_company_chunks_or_threads(token_fmt):
    """The same bits whether a row is alone, in a batch, in a chunk, split over threads or not."""
    from llmopt.runtime.kernels.native import get_num_threads, set_num_threads

    before = get_num_threads()
    query, caches, _, batch = make(token_fmt, "compiled", "mixed", dim=64)
    try:
        set_num_threads(1)
        whole = paged_backend("compiled")(query, *caches, batch, scale=0.2, window=40)
        set_num_threads(3)
        for row, length in enumerate(batch.lengths):
            first, last = batch.query_bounds[row], batch.query_bounds[row + 1]
            for token in range(first, last):
                reach, table = length - (last - token) + 1, batch.block_tables[row : row + 1]
                one = Batch(
                    batch.slots[token : token + 1], torch.tensor([0, 1]).int(), torch.tensor([reach]).int(), table, 1,
                    reach,
                )  # fmt: skip
                got = paged_backend("compiled")(query[token : token + 1], *caches, one, scale=0.2, window=40)
                assert torch.equal(got[0], whole[token])
    finally:
        set_num_threads(before)


@pytest.mark.skipif(INTERPRETED, reason="needs no triton")
def test_native_long_contexts_are_split_to_the_same_bits(token_fmt):
    from llmopt.runtime.kernels.native import get_num_threads, set_num_threads

    before, results = get_num_threads(), []
    query, caches, _, batch = make(token_fmt, "compiled", "decode", dim=64)
    table = torch.randint(0, caches[0].shape[0], (1, 50), generator=torch.Generator().manual_seed(2)).int()
    long = Batch(batch.slots[:1], torch.tensor([0, 1]).int(), torch.tensor([1571]).int(), table, 1, 1571)
    try:
        for threads in (1, 2, 5):
            set_num_threads(threads)
            results.append(paged_backend("compiled")(query[:1], *caches, long, scale=0.2))
    finally:
        set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# -- selection


@pytest.mark.skipif(INTERPRETED, reason="needs no triton")
def test_backends_that_cannot_refuse_and_the_choice_says_so(fmt, monkeypatch):
    one, cuda = [layer()], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("varlen", "flash_attn"):
        assert refusal(name, one, fmt.dtype, cuda, 256)
    assert f"not {fmt.name}" in refusal("varlen", one, fmt.dtype, cuda, 256)
    chosen = choose("auto", one, fmt.dtype, cuda)
    assert chosen.name in ("triton", "torch") and dict(chosen.refused)["varlen"]
    assert choose("auto", one, fmt.dtype, torch.device("cpu")).name == "compiled"
    latent = [layer(kind="gather")]
    with pytest.raises(RunError, match="latent attention"):
        choose("auto", latent, fmt.dtype, torch.device("cpu"))


@pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs triton, in its interpreter"
)
def test_triton_in_the_interpreter():
    """Triton's interpreter needs its environment variable before the first import: a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "backend_equals"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stdout[-3000:]
