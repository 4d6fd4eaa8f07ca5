"""Every attention backend against the float64 reference, over a grid of shapes that includes odd ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import RunError
from llmopt.runtime.attention.layer import AttentionLayer, Batch, visible
from llmopt.runtime.attention.op import active_batch, batch_of, cache_writer, paged_backend, register_ops
from llmopt.runtime.attention.pool import KVPool, bytes_per_block, group_layers
from llmopt.runtime.attention.select import choose, refusal

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
BACKENDS = ["triton"] if INTERPRETED else ["torch", "compiled"]

SHAPES = {  # heads, kv heads, key dim, value dim, block size
    "mha": (4, 4, 16, 16, 4),
    "gqa": (6, 2, 32, 32, 16),
    "mqa": (9, 3, 64, 64, 16),
    "odd": (5, 1, 20, 12, 3),
    "wide": (2, 1, 80, 96, 8),
    "blocks_of_32": (6, 2, 48, 48, 32),
    "blocks_of_64": (3, 3, 128, 128, 64),
}
ROWS = {  # (tokens in this step, tokens of context before it)
    "decode": [(1, 0), (1, 5), (1, 40), (1, 15), (1, 16)],
    "mixed": [(7, 0), (1, 12), (3, 33), (1, 0), (20, 9)],
    "one": [(1, 70)],
    "prefill": [(45, 0)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 6},
    "window_of_one": {"window": 1},
    "kept_first": {"window": 4, "sink_tokens": 2},
    "kept_blocks": {"window": 5, "sink_tokens": 19},
    "chunk": {"chunk": 8},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True, "window": 9},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(shape: str, rows: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A pool of random keys and values with shuffled tables, and a batch over it: (query, keys, values, batch)."""
    heads, kv_heads, key_dim, value_dim, size = SHAPES[shape]
    g = torch.Generator().manual_seed(seed)
    spans = ROWS[rows]
    lengths = [new + old for new, old in spans]
    blocks = [-(-n // size) for n in lengths]
    pool_blocks = sum(blocks) + 5
    order = torch.randperm(pool_blocks, generator=g).tolist()
    width = max(blocks) + 1
    tables = torch.zeros(len(spans), width, dtype=torch.int32)
    slots: list[int] = []
    for i, (new, old) in enumerate(spans):
        mine = [order.pop() for _ in range(blocks[i])]
        tables[i, : blocks[i]] = torch.tensor(mine)
        slots += [mine[p // size] * size + p % size for p in range(old, old + new)]
    bounds = torch.tensor([0, *(new for new, _ in spans)]).cumsum(0).int()
    keys = torch.randn(pool_blocks, size, kv_heads, key_dim, generator=g).to(dtype)
    values = torch.randn(pool_blocks, size, kv_heads, value_dim, generator=g).to(dtype)
    query = torch.randn(int(bounds[-1]), heads, key_dim, generator=g).to(dtype)
    batch = Batch(
        torch.tensor(slots), bounds, torch.tensor(lengths).int(), tables, max(n for n, _ in spans), max(lengths)
    )
    return query, keys, values, batch


def in_layout_of(backend: str, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same keys and values as a backend keeps them; skips where it cannot keep such."""
    if backend != "compiled":
        return keys, values
    blocks, size, heads, dim = keys.shape
    one = layer(num_kv_heads=heads, key_dim=dim, value_dim=values.shape[-1])
    why = refusal("compiled", [one], keys.dtype, torch.device("cpu"), size)
    if why:
        pytest.skip(f"compiled: {why}")
    pool = KVPool(group_layers([replace(one, cache_heads=heads, cache_key_dim=dim, cache_value_dim=dim)]),
                  blocks - 1, size, keys.dtype, "cpu", backend)  # fmt: skip
    key_cache, value_cache = (t[0] for t in pool.tensors)
    batch = Batch(torch.arange(blocks * size), *[torch.zeros(1)] * 3, 1, 1)  # only the slots are read
    cache_writer(backend)(keys.flatten(0, 1), values.flatten(0, 1), key_cache, value_cache, batch)
    return key_cache, value_cache


def arguments(option: str, heads: int, key_dim: int) -> dict:
    out = {"scale": key_dim**-0.5 * 1.1, **OPTIONS[option]}
    if out.get("sinks"):
        out["sinks"] = torch.linspace(-1, 2, heads)
    return out


def cases() -> list[tuple[str, str, str, str]]:
    """(backend, shape, rows, option): what each backend can run, fewer of them in the slow interpreter."""
    out = []
    for backend in BACKENDS:
        for shape, (_, _, _, _, size) in SHAPES.items():
            if (backend == "compiled") != (size % 32 == 0) or (INTERPRETED and shape not in ("gqa", "odd")):
                continue
            for rows in ("decode", "mixed") if INTERPRETED or shape not in ("gqa", "blocks_of_32") else ROWS:
                for option in OPTIONS:
                    if INTERPRETED and shape == "odd" and option not in ("plain", "kept_first", "sinks"):
                        continue
                    if backend != "compiled" or option != "chunk":
                        out.append((backend, shape, rows, option))
    return out


@pytest.mark.parametrize(("backend", "shape", "rows", "option"), cases())
def test_backend_equals_reference(backend: str, shape: str, rows: str, option: str) -> None:
    query, keys, values, batch = make(shape, rows)
    options = arguments(option, query.shape[1], query.shape[2])
    want = paged_backend("reference")(query, keys, values, batch, **options)
    got = paged_backend(backend)(query, *in_layout_of(backend, keys, values), batch, **options)
    assert got.shape == want.shape and got.dtype == query.dtype
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


@pytest.mark.skipif(not INTERPRETED, reason="Triton is interpreted in a process of its own")
@pytest.mark.parametrize("option", ["plain", "window", "sinks"])
def test_context_split_over_programs(option: str) -> None:
    from llmopt.runtime.attention.triton_paged import num_splits, paged_attention_triton

    query, keys, values, batch = make("gqa", "decode")
    options = arguments(option, query.shape[1], query.shape[2])
    want = paged_backend("reference")(query, keys, values, batch, **options)
    for splits in (2, 5):  # most of five shares are empty for the short rows
        got = paged_attention_triton(query, keys, values, batch, splits=splits, **options)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)
    assert num_splits(256, 8, 4096, 132) == 1 and num_splits(1, 8, 100, 132) == 1
    assert num_splits(1, 8, 1 << 20, 132) == 33 and num_splits(1, 1, 1 << 20, 132) == 64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", ["plain", "softcap", "sinks"])
def test_bfloat16(backend: str, option: str) -> None:
    query, keys, values, batch = make("blocks_of_32", "mixed", torch.bfloat16)
    options = arguments(option, query.shape[1], query.shape[2])
    want = paged_backend("reference")(query.double(), keys, values, batch, **options)
    got = paged_backend(backend)(query, *in_layout_of(backend, keys, values), batch, **options)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 1e-2


def test_reference_is_plain_attention() -> None:
    """The reference itself against torch's attention on one contiguous sequence."""
    torch.manual_seed(0)
    length, heads, dim = 10, 3, 8
    q, k, v = (torch.randn(length, heads, dim, dtype=torch.float64) for _ in range(3))
    batch = Batch(
        torch.arange(length), torch.tensor([0, length]), torch.tensor([length]), torch.tensor([[0]]), length, length
    )
    got = paged_backend("reference")(q, k[None], v[None], batch, scale=0.3)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=0.3
    ).transpose(0, 1)
    torch.testing.assert_close(got, want)


def test_visible_by_hand() -> None:
    at, keys = torch.tensor([5]), torch.arange(8)

    def seen(window: int = 0, chunk: int = 0, sink_tokens: int = 0) -> list[int]:
        return visible(at, keys, window, chunk, sink_tokens)[0].nonzero()[:, 0].tolist()

    assert seen() == [0, 1, 2, 3, 4, 5]
    assert seen(window=2) == [4, 5]
    assert seen(window=2, sink_tokens=1) == [0, 4, 5]
    assert seen(chunk=4) == [4, 5]
    assert seen(chunk=6) == [0, 1, 2, 3, 4, 5]


@pytest.mark.skipif(INTERPRETED, reason="the operator is tested with torch's backend")
def test_operator_writes_attends_and_obeys_its_schema() -> None:
    ops = register_ops()
    query, keys, values, batch = make("gqa", "mixed")
    key_pool, value_pool = torch.stack([keys * 0, keys]), torch.stack([values * 0, values])
    new_key = torch.randn(query.shape[0], 2, 32)
    new_value = torch.randn(query.shape[0], 2, 32)
    args = (
        query, new_key, new_value, key_pool, value_pool, 1, batch.slots, batch.cu_seqlens_q, batch.seq_lens,
        batch.block_tables, None, 0.2, 0, 0, 0, 0.0, "torch",
    )  # fmt: skip
    torch.library.opcheck(ops.paged_attention.default, args)
    got = ops.paged_attention(*args)
    keys.flatten(0, 1)[batch.slots] = new_key
    values.flatten(0, 1)[batch.slots] = new_value
    torch.testing.assert_close(key_pool[1], keys)
    torch.testing.assert_close(value_pool[1], values)
    assert not key_pool[0].any(), "another layer's keys were touched"
    want = paged_backend("reference")(query, keys, values, batch, scale=0.2)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


def test_active_batch_is_used_only_for_its_own_tensors() -> None:
    _, _, _, batch = make("mha", "mixed")
    _, _, _, other = make("mha", "decode")
    with active_batch(batch):
        assert batch_of(batch.slots, batch.cu_seqlens_q, batch.seq_lens, batch.block_tables) is batch
        made = batch_of(other.slots, other.cu_seqlens_q, other.seq_lens, other.block_tables)
    assert made is not batch and (made.max_q, made.max_k) == (other.max_q, other.max_k)


def layer(**changes: Any) -> AttentionLayer:
    base = {"layer_idx": 0, "num_heads": 4, "num_kv_heads": 2, "key_dim": 8, "value_dim": 8,
            "cache_heads": 2, "cache_key_dim": 8, "cache_value_dim": 8}  # fmt: skip
    return AttentionLayer(**{**base, **changes})


def test_pool_groups_layers_by_shape_and_counts_its_bytes() -> None:
    layers = group_layers([layer(), layer(layer_idx=1, cache_heads=1), layer(layer_idx=2)])
    assert [(x.group, x.index) for x in layers] == [(0, 0), (1, 0), (0, 1)]
    pool = KVPool(layers, num_blocks=7, block_size=4, dtype=torch.float32, device="cpu")
    assert [t.shape[:4] for t in pool.tensors] == [(2, 8, 4, 2), (2, 8, 4, 2), (1, 8, 4, 1), (1, 8, 4, 1)]
    assert pool.nbytes == 8 * bytes_per_block(layers, 4, 4) == 8 * 4 * 4 * (2 * 2 * 16 + 1 * 16)


def test_pool_that_cannot_be_had_says_so() -> None:
    with pytest.raises(RunError, match="MiB"):
        KVPool([layer()], num_blocks=1 << 45, block_size=16, dtype=torch.float32, device="cpu")


def test_choice_is_stated_and_only_auto_falls_back() -> None:
    cpu = torch.device("cpu")
    choice = choose("auto", [layer()], torch.float32, cpu)
    assert choice.name in str(choice) and choice.reason in str(choice) and choice.block_size in (16, 32)
    assert choose("reference", [layer()], torch.float32, cpu, 5).block_size == 5
    with pytest.raises(RunError, match="CUDA"):
        choose("varlen", [layer()], torch.bfloat16, cpu)
    with pytest.raises(RunError, match="unknown attention backend"):
        choose("fast", [layer()], torch.float32, cpu)


@pytest.mark.skipif(INTERPRETED, reason="already inside the interpreter")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_in_the_interpreter() -> None:
    """This file again, in a process whose Triton interprets (that is decided when triton is first imported)."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            str(Path(__file__)),
            "-p",
            "no:cacheprovider",
            "-k",
            "reference or bfloat16 or split",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("form", range(4), ids=["plain", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("kernel", ["decode_kernel", "reduce_kernel", "prefill_kernel"])
def test_triton_kernels_compile_for_hopper(kernel: str, form: int) -> None:
    """To a cubin for compute capability 9.0, with the options that take every branch; needs no GPU."""
    import triton
    from llmopt.runtime.attention import triton_kernels
    from triton.backends.compiler import GPUTarget

    function = getattr(triton_kernels, kernel)
    constants = {
        "GROUP": 4, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_D": 128, "BLOCK_DV": 128, "BLOCK_N": 64, "BLOCK_SIZE": 16,
        "SOFTCAP": True, "UPCAST": False, "BLOCK_M": 16, "BLOCK_SPLITS": 16, "SINKS": True, "BLOCK_Q": 4,
        "FORMAT": form,
    }  # fmt: skip
    types = {"scale": "fp32", "softcap": "fp32", "table_ptr": "*i32", "bounds_ptr": "*i32", "lengths_ptr": "*i32",
             "partial_ptr": "*fp32", "maximum_ptr": "*fp32", "total_ptr": "*fp32"}  # fmt: skip
    if form:  # codes, and the bits of bfloat16 scales
        types |= {"key_ptr": "*u8", "value_ptr": "*u8", "key_scale_ptr": "*i16", "value_scale_ptr": "*i16"}
    signature = {}
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
    source = triton.compiler.ASTSource(
        fn=function, signature=signature, constexprs={k: v for k, v in constants.items() if k in function.arg_names}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 1000
