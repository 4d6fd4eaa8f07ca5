"""Keys by channel (int4): the definition, every backend against what a query must read, and that cuts do not matter."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from llmopt.optimizer.errors import RunError
from llmopt.runtime.attention.layer import AttentionLayer, Batch, visible
from llmopt.runtime.attention.op import cache_writer, paged_backend
from llmopt.runtime.attention.pool import KVPool, group_layers
from llmopt.runtime.attention.reference import attend_one
from llmopt.runtime.attention.select import choose, refusal
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.runner_inputs import BatchBuilder
from llmopt.runtime.kernels.build import unavailable_reason
from llmopt.runtime.kernels.kv_format import (
    FORMATS,
    dequantize,
    dequantize_keys,
    quantize,
    quantize_keys,
    split,
    split_keys,
    tail_quarters,
    turn_back,
)

INT4 = FORMATS["int4"]
BACKENDS = ["reference", "torch", "compiled", "invariant:torch", "invariant:compiled"]
needs_native = pytest.mark.skipif(bool(unavailable_reason()), reason="the native kernels do not compile here")
Steps = list[list[tuple[int, int, int]]]
"""Of each step the rows: (sequence, first token, the one behind the last)."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layer(heads: int = 6, kv_heads: int = 2, dim: int = 32, **more) -> AttentionLayer:
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "key_dim": dim, "value_dim": dim}
    return AttentionLayer(layer_idx=0, **shape, cache_heads=kv_heads, cache_key_dim=dim, cache_value_dim=dim, **more)


# -- the definition


def test_keys_by_hand():
    """Steps of 1 and 0.5; the third channel, whose range is small beside its size, has steps of its size over 127."""
    x = torch.tensor([[0.0, 1.0, 127.0], [15.0, -2.0, 127.0], [3.4, 5.5, 125.0], [7.5, 1.25, 126.0]])
    codes, scales, zeros = quantize_keys(torch.cat((x, torch.zeros(4, 1)), 1))
    assert scales.tolist() == [1.0, 0.5, 1.0, 0.0] and zeros.tolist() == [0, 4, -125, 0]
    assert torch.cat((codes & 15, codes >> 4), 1).tolist() == [[0, 6, 2, 0], [15, 0, 2, 0], [3, 15, 0, 0], [8, 6, 1, 0]]
    back = dequantize_keys(codes, scales, zeros)
    torch.testing.assert_close(back[:, 2], torch.tensor([127.0, 127.0, 125.0, 126.0]))
    assert back[:, 0].tolist() == [0.0, 15.0, 3.0, 8.0] and back[:, 3].eq(0).all()


def test_error_is_half_a_step_and_a_scale_s_rounding():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(50, 32, 64, generator=g) * torch.logspace(-2, 2, 64) + 30 * torch.randn(64, generator=g)
    codes, scales, zeros = quantize_keys(x)
    error = (dequantize_keys(codes, scales, zeros) - x.bfloat16().float()).abs()
    assert (error <= 0.55 * scales.float()[:, None]).all()


def test_what_is_not_finite_makes_its_channel_nan():
    x = torch.randn(3, 8, 4)
    x[0, 2, 1], x[1, 3, 0], x[2, 0, 3] = torch.inf, torch.nan, -torch.inf
    bad = dequantize_keys(*quantize_keys(x)).isnan()
    assert bad.any(1).tolist() == [[i == j for j in range(4)] for i in (1, 0, 3)]


def test_views_cover_the_block_and_a_tail_fits():
    """Four quarters, which leave every scale alone."""
    pool = KVPool(group_layers([layer(dim=20)]), 2, 8, INT4.dtype, "cpu")
    keys, values = (t[0] for t in pool.tensors)
    for part in split_keys(keys, 8):
        part.view(torch.uint8).fill_(0xFF)
    assert keys.eq(0xFF).all()
    keys.zero_()
    quarters = tail_quarters(keys, values)
    assert [q.shape for q in quarters] == [torch.Size((3, 2, 2, 20))] * 2
    for q in quarters:
        q.view(torch.int16).fill_(-1)
    codes, scales, zeros = split_keys(keys, 8)
    assert codes.eq(0xFF).all() and scales.eq(0).all() and zeros.eq(0).all()
    codes, scales = split(values, INT4)
    assert codes.eq(0xFF).all() and scales.eq(0).all()


def test_rows_that_need_two_tails_are_refused():
    for start, end, drafts, crosses in (
        (0, 100, 0, False), (5, 32, 0, False), (5, 33, 0, True), (32, 90, 0, False), (30, 32, 1, False),
        (31, 33, 1, True), (32, 66, 2, False), (32, 66, 3, True), (32, 65, 1, False), (30, 31, 0, False),
    ):  # fmt: skip
        assert INT4.crosses(start, end, drafts, 32) == crosses, (start, end, drafts)
        assert not FORMATS["int8"].crosses(start, end, drafts, 32)
    builder = BatchBuilder(32, 10, fmt=INT4)
    builder.arrays(StepPlan((Row(1, 5, (0,) * 27, (0, 1, 2), 1),)))
    with pytest.raises(RunError, match="cross a block"):
        builder.arrays(StepPlan((Row(1, 5, (0,) * 28, (0, 1, 2, 3), 1),)))
    with pytest.raises(RunError, match="a tail of 2"):
        builder.arrays(StepPlan((Row(1, 5, (0,) * 27, (0, 1), 1),)))


def test_what_cannot_be_kept_is_refused():
    one, cpu = layer(), torch.device("cpu")
    assert choose("torch", [one], INT4.dtype, cpu).block_size == 32
    assert "multiple of 4" in refusal("torch", [one], INT4.dtype, cpu, 6)
    if importlib.util.find_spec("triton") is not None:
        assert "by channel" in refusal("triton", [one], INT4.dtype, torch.device("cuda"), 32)
    uneven = AttentionLayer(0, 2, 2, 32, 16, cache_heads=2, cache_key_dim=32, cache_value_dim=16)
    assert "32 elements are not 16" in refusal("torch", [uneven], INT4.dtype, cpu, 32)


# -- backends


class Texts:
    """Random queries, keys with outlying and unequal channels, and values of some sequences."""

    def __init__(self, lengths: list[int], heads: int = 6, kv_heads: int = 2, dim: int = 32, size: int = 32) -> None:
        g = torch.Generator().manual_seed(3)
        self.lengths, self.heads, self.kv_heads, self.dim, self.size = lengths, heads, kv_heads, dim, size
        self.queries = [torch.randn(n, heads, dim, generator=g) for n in lengths]
        scale, shift = torch.logspace(-1, 1, dim), 10 * torch.randn(kv_heads, dim, generator=g)
        self.keys = [torch.randn(n, kv_heads, dim, generator=g) * scale + shift for n in lengths]
        self.values = [torch.randn(n, kv_heads, dim, generator=g) * 3 for n in lengths]
        blocks = [-(-n // size) + INT4.tail_blocks for n in lengths]
        self.num_blocks = sum(blocks) + 3
        order = torch.randperm(self.num_blocks, generator=g).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in blocks]

    def expected(self, sequence: int, **options) -> torch.Tensor:
        """Outputs [n, H, D] float64, by the words of the definition."""
        keys, values = self.keys[sequence], self.values[sequence]
        stored = turn_back(dequantize(*quantize(values, INT4), INT4).double(), INT4)
        window, sink_tokens = options.pop("window", 0), options.pop("sink_tokens", 0)
        options = {"softcap": 0.0, "sinks": None, **options}
        out, coded = [], keys[:0].double()
        for p in range(len(keys)):
            own = p // self.size * self.size
            if own > len(coded):
                block = quantize_keys(keys[len(coded) : own].transpose(0, 1))
                coded = torch.cat((coded, dequantize_keys(*block).transpose(0, 1).double()))
            read = torch.cat((coded, keys[own : p + 1].bfloat16().double()))
            seen = visible(torch.tensor([p]), torch.arange(p + 1), window, 0, sink_tokens)[0]
            query = self.queries[sequence][p]
            out.append(attend_one(query, read, stored[: p + 1], seen, **options))
        return torch.stack(out)

    def run(self, backend: str, steps: Steps, **options) -> list[torch.Tensor]:
        """Outputs of every sequence, written and attended in steps, over a pool full of other numbers."""
        name = backend.removeprefix("invariant:")
        pool = KVPool(group_layers([layer(self.heads, self.kv_heads, self.dim)]), self.num_blocks, self.size,
                      INT4.dtype, "cpu", name)  # fmt: skip
        caches = tuple(t[0] for t in pool.tensors)
        for cache in caches:
            cache.random_(0, 100, generator=torch.Generator().manual_seed(1))
        got: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        if backend != name:  # its runner's tiles: 16 tokens at most, each a sequence of its own
            steps = [[(s, i, min(i // 16 * 16 + 16, b))] for step in steps for s, a, b in step for i in tiles(a, b)]
        for step in steps:
            parts = step if backend == name else [(s, i, i + 1) for s, a, b in step for i in range(a, b)]
            batch = self.batch(parts)
            query, key, value = (
                torch.cat([x[s][a:b] for s, a, b in step]) for x in (self.queries, self.keys, self.values)
            )
            cache_writer(backend)(key, value, *caches, batch)
            out = paged_backend(backend)(query, *caches, batch, new_keys=key, **options)
            for (s, _, _), part in zip(step, out.split([b - a for _, a, b in step])):
                got[s].append(part)
        return [torch.cat(parts) for parts in got]

    def batch(self, rows: list[tuple[int, int, int]]) -> Batch:
        size, width = self.size, max(-(-b // self.size) + 2 for _, _, b in rows)
        tables = torch.zeros(len(rows), width, dtype=torch.int32)
        for i, (s, _, b) in enumerate(rows):
            used = -(-b // size) + 2
            tables[i, :used] = torch.tensor(self.tables[s][:used])
        slots = [self.tables[s][p // size] * size + p % size for s, a, b in rows for p in range(a, b)]
        bounds = torch.tensor([0, *(b - a for _, a, b in rows)]).cumsum(0).int()
        lengths = torch.tensor([b for _, _, b in rows]).int()
        longest = max(b - a for _, a, b in rows)
        return Batch(torch.tensor(slots), bounds, lengths, tables, longest, int(lengths.max()))

    def steps(self, seed: int | None) -> Steps:
        """Every sequence in pieces of random length and company; None: each in one piece, one after another."""
        if seed is None:
            return [[(s, 0, n)] for s, n in enumerate(self.lengths)]
        rng, done, steps = random.Random(seed), [0] * len(self.lengths), []
        while any(d < n for d, n in zip(done, self.lengths)):
            rows = []
            running = [s for s, n in enumerate(self.lengths) if done[s] < n]
            for s in rng.sample(running, rng.randint(1, len(running))):
                end = min(done[s] + rng.choice([1, 1, 4, 19, 70]), self.lengths[s])
                if done[s] % self.size:
                    end = min(end, (done[s] // self.size + 1) * self.size)
                rows.append((s, done[s], end))
                done[s] = end
            steps.append(rows)
        return steps


def tiles(first: int, end: int) -> list[int]:
    return [first, *range(first // 16 * 16 + 16, end, 16)]


OPTIONS = {
    "plain": {},
    "window": {"window": 9},
    "sink tokens": {"window": 40, "sink_tokens": 3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, 6)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", list(OPTIONS))
def test_backend_equals_the_definition(backend, option):
    if backend.endswith("compiled") and unavailable_reason():
        pytest.skip(unavailable_reason())
    texts = Texts([100, 64, 33, 5])
    options = {"scale": 0.05, **OPTIONS[option]}
    got = texts.run(backend, texts.steps(7), **options)
    tolerance = 0.02 if backend.endswith("compiled") else 2e-5  # the native kernels round to bfloat16 on the way
    for sequence, out in enumerate(got):
        want = texts.expected(sequence, **options)
        assert ((out.double() - want).norm(dim=-1) / want.norm(dim=-1)).max() < tolerance


@pytest.mark.parametrize("backend", ["compiled", "invariant:torch"])
@pytest.mark.parametrize("option", ["plain", "sink tokens"])
def test_cuts_and_company_do_not_change_a_bit(backend, option):
    if backend == "compiled" and unavailable_reason():
        pytest.skip(unavailable_reason())
    texts = Texts([150, 64, 33, 290] if backend == "compiled" else [70, 33], dim=64)
    options = {"scale": 0.05, **OPTIONS[option]}
    alone = texts.run(backend, texts.steps(None), **options)
    for seed in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(alone, texts.run(backend, texts.steps(seed), **options)))


@needs_native
def test_a_step_may_be_repeated_and_rejected_drafts_leave_nothing():
    """Rows that reach a block's end with tokens that are not the text's, then the text's own."""
    texts = Texts([90], dim=64)
    want = texts.run("compiled", texts.steps(None), scale=0.05)[0]
    drafts = Texts([90], dim=64)
    drafts.keys = [torch.cat((texts.keys[0][:30], 5 * torch.randn(60, 2, 64)))]
    pool = KVPool(group_layers([layer(dim=64)]), texts.num_blocks, 32, INT4.dtype, "cpu", "compiled")
    caches = tuple(t[0] for t in pool.tensors)
    got = {}
    for text, a, b in (
        (texts, 0, 30), (drafts, 30, 32), (texts, 30, 31), (drafts, 31, 32), (texts, 31, 32), (texts, 32, 64),
        (drafts, 64, 90), (texts, 64, 80), (texts, 64, 80), (texts, 80, 90),
    ):  # fmt: skip
        batch = text.batch([(0, a, b)])
        cache_writer("compiled")(text.keys[0][a:b], text.values[0][a:b], *caches, batch)
        new = text.keys[0][a:b]
        out = paged_backend("compiled")(text.queries[0][a:b], *caches, batch, new_keys=new, scale=0.05)
        if text is texts:
            got[a] = out
    assert torch.equal(torch.cat([got[a] for a in sorted(got)]), want)


@pytest.mark.parametrize("isa", ["native", "portable"])
@pytest.mark.parametrize("dim", [20, 64])
def test_native_codes_are_those_of_the_definition(isa, dim, monkeypatch):
    """To the bit, in the native layout: keys of full blocks, a tail's exact keys, and values."""
    from llmopt.runtime.kernels import build
    from llmopt.runtime.kernels.attention import allocate_kv, write_keys, write_kv

    monkeypatch.setenv("LLMOPT_KERNELS_ISA", isa)
    if build.unavailable_reason():
        pytest.skip(build.unavailable_reason())
    size, heads, padded = 32, 2, -(-dim // 32) * 32
    g = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 2 * size + 19, heads, dim, generator=g) * torch.logspace(-3, 3, dim)
    k[3, 1, 5], k[40, 0, 0] = torch.nan, torch.inf
    keys, values = allocate_kv(5, size, heads, dim, INT4.dtype)
    table = torch.tensor([[2, 0, 1, 4, 3]])
    write_kv(k, v, keys, values, table[0, torch.arange(len(k)) // size] * size + torch.arange(len(k)) % size)
    for a, b in ((0, 20), (20, 31), (31, 32), (32, 64), (64, len(k))):
        write_keys(k[a:b], keys, values, torch.tensor([0, b - a]), torch.tensor([b]), table)
    width = padded * size // 2
    for place, block in enumerate((2, 0)):
        codes, scales, zeros = quantize_keys(k[place * size : (place + 1) * size].transpose(0, 1))
        flat = keys[block].flatten()
        got = unpack_keys(flat[: heads * width].view(heads, -1), size, padded)[..., :dim]
        assert torch.equal(got, torch.cat((codes & 15, codes >> 4), -1))
        there = flat[heads * width : heads * (width + 2 * padded)].view(torch.bfloat16).view(heads, -1)[:, :dim]
        assert torch.equal(there.nan_to_num(-1), scales.nan_to_num(-1))
        assert torch.equal(flat[heads * (width + 2 * padded) :].view(torch.int8).view(heads, -1)[:, :dim], zeros)
    quarters = [c[b].flatten() for b in (4, 3) for c in (keys, values)]
    for number, part in enumerate(quarters[:3]):
        inside = slice(2 * size + 8 * number, min(2 * size + 8 * number + 8, len(k)))
        step = width if number % 2 == 0 else width + 2 * size
        for head in range(heads):
            exact = part[head * step : head * step + width].view(torch.bfloat16).view(padded // 2, 8, 2)
            got = exact.transpose(0, 1).flatten(1)[: inside.stop - inside.start, :dim]
            assert torch.equal(got, k[inside, head].bfloat16())
    codes, scales = quantize(v[:size], INT4)
    flat = values[2].view(heads, -1)
    lanes = flat[:, :width].reshape(heads, size // 4, padded // 32, 16, 4)[..., [0, 2, 1, 3]]
    got = torch.stack((lanes & 15, lanes >> 4), -3).permute(0, 1, 5, 2, 3, 4).reshape(heads, size, padded)[..., :dim]
    assert torch.equal(got, torch.cat((codes & 15, codes >> 4), -1).transpose(0, 1))
    assert torch.equal(flat[:, width:].contiguous().view(torch.bfloat16), scales.t())


def unpack_keys(flat: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Codes [H, size, dim], a byte each, of keys [H, bytes]. Bytes of a lane: dims (0, 2), (4, 6), (1, 3), (5, 7)."""
    lanes = flat.reshape(-1, dim // 8, size, 4)
    parts = torch.stack((lanes & 15, lanes >> 4), -1).flatten(-2)[..., [0, 4, 1, 5, 2, 6, 3, 7]]
    return parts.permute(0, 2, 1, 3).reshape(-1, size, dim)


@needs_native
def test_native_threads_do_not_change_a_bit():
    from llmopt.runtime.kernels.native import get_num_threads, set_num_threads

    before, results = get_num_threads(), []
    texts = Texts([700], dim=64)
    steps = [[(0, 0, 620)], [(0, 620, 640)], [(0, 640, 690)], *([(0, i, i + 1)] for i in range(690, 700))]
    try:
        for threads in (1, 2, 5):
            set_num_threads(threads)
            results.append(texts.run("compiled", steps, scale=0.05)[0])
    finally:
        set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# -- the engine


@needs_native
@pytest.mark.parametrize("offload_gib", [0.0, 0.01])
def test_texts_do_not_depend_on_drafts_preemption_prefixes_or_the_host(offload_gib):
    """Drafts across blocks' ends, half of them wrong, in a pool so small that requests are preempted in the middle of a
    block: every text is that of the request alone."""
    from llmopt.runtime.engine.engine import Engine
    from llmopt.runtime.engine.runner_select import build_runner
    from llmopt.runtime.engine.scheduler_config import SchedulerConfig
    from llmopt.tests.test_kv_cache import llama
    from llmopt.tests.test_kv_sliding import answers, text

    runner = build_runner(llama(), "native", kv_dtype="int4", num_blocks=12, max_model_len=128, offload_gib=offload_gib)

    class Guesser:
        def propose(self, requests):
            known = [wanted[tuple(r.token_ids[: r.num_prompt_tokens])][r.num_output_tokens :] for r in requests]
            return [[*tokens[:3], 1] for tokens in known]

        def observe(self, request, num_drafts, num_accepted): ...

        def forget(self, request): ...

    shared = [t % 200 for t in text(70, 5)]
    prompts = [[*shared, 1], shared[:20], [*shared, 2, 3], shared[30:65], shared[:50], [*shared, 1]]
    wanted = {}
    for prompt in prompts:
        engine = Engine(runner, scheduler=SchedulerConfig(max_num_seqs=1, prefix_caching=False))
        wanted[tuple(prompt)] = answers(engine, [prompt], 40)["0"]
    for drafter in (None, Guesser()):
        engine = Engine(runner, scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=23), drafter=drafter)
        assert answers(engine, prompts, 40) == {str(i): wanted[tuple(p)] for i, p in enumerate(prompts)}
        metrics = engine.metrics()
        assert metrics.num_preemptions_total > 0 and metrics.prefix_cache_hits_total > 0
        assert engine.scheduler.pool.num_free == runner.num_blocks
        if offload_gib:
            assert metrics.kv_blocks_swapped_in_total > 0
    runner.close()
