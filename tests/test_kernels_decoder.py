"""The fused decoder against transformers' eager models, on tiny random configurations."""

import pytest
import torch
import transformers
from llmopt.runtime.kernels import build
from llmopt.runtime.kernels.attention import matches_torch
from llmopt.runtime.kernels.decoder import DecoderOptions, build_decoder
from llmopt.runtime.kernels.native import set_num_threads
from llmopt.runtime.kernels.recognize import UnsupportedModel
from torch import nn

SMALL = {
    "vocab_size": 131, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "llama-tied-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                                                      "original_max_position_embeddings": 64}}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3", {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "smollm3": ("SmolLM3", {}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                            "logits_scaling": 2.0}),
    "olmo2": ("Olmo2", {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def available():
    reason = build.unavailable_reason()
    if reason:
        pytest.skip(reason)
    set_num_threads(1)  # the models are too small to share, and the machine may be busy


def tiny(name, dtype=torch.float32, **changes):
    kind, extra = ARCHITECTURES[name]
    names = (f"{kind}TextConfig", f"{kind}Config")
    config = next(getattr(transformers, n) for n in names if hasattr(transformers, n))(**{**SMALL, **extra, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    for parameter_name, parameter in model.named_parameters():
        with torch.no_grad():  # larger than the default initialization, so that every part shows in the logits
            parameter.normal_(0, 0.5 if "norm" in parameter_name else 0.2)
            if "norm" in parameter_name and "Gemma" not in kind:
                parameter.add_(1.0)
    return model.to(dtype).eval()


def schedule(decoder, prompts, chunks, dtype=torch.float32, block_size=32):
    """Runs the prompts together, chunk by chunk, over shuffled blocks; returns logits [length, vocab] a prompt.

    chunks: for each step, how many tokens every prompt advances.
    """
    most = max(len(p) for p in prompts)
    per = -(-most // block_size)
    decoder.allocate_kv(per * len(prompts) + 2, block_size, dtype)
    order = torch.randperm(per * len(prompts) + 2, generator=torch.Generator().manual_seed(3))
    tables = order[: per * len(prompts)].view(len(prompts), per)
    done, out = [0] * len(prompts), [[] for _ in prompts]
    for step in chunks:
        rows = [(r, done[r], min(done[r] + n, len(p))) for r, (p, n) in enumerate(zip(prompts, step))]
        rows = [row for row in rows if row[2] > row[1]]
        at = [torch.arange(first, last) for _, first, last in rows]
        logits = decoder.forward(
            torch.cat([prompts[r][first:last] for r, first, last in rows]),
            torch.cat(at),
            torch.cat([tables[r][a // block_size] * block_size + a % block_size for (r, _, _), a in zip(rows, at)]),
            torch.tensor([0, *(last - first for _, first, last in rows)]).cumsum(0),
            [last for _, _, last in rows],
            tables[[r for r, _, _ in rows]],
            torch.arange(sum(map(len, at))),
        )
        for (r, _, last), part in zip(rows, logits.split([len(a) for a in at])):
            out[r].append(part)
            done[r] = last
    assert done == [len(p) for p in prompts]
    return [torch.cat(parts) for parts in out]


def eager(model, prompt):
    with torch.no_grad():
        return model(input_ids=prompt.unsqueeze(0), use_cache=False).logits[0].float()


PROMPTS = [torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)) for n in (50, 3, 37, 18)]
CHUNKS = [(20, 0, 1, 16), (1, 2, 30, 1), (28, 1, 1, 1), (1, 0, 5, 0)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_transformers_in_float32(name):
    model = tiny(name)
    decoder = build_decoder(model)
    for prompt, got in zip(PROMPTS, schedule(decoder, PROMPTS, CHUNKS)):
        expected = eager(model, prompt)
        assert (got - expected).abs().max() < 2e-5 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_bfloat16_without_roundings_is_nearer_to_float32_than_transformers(name):
    model = tiny(name)
    half = tiny(name, torch.bfloat16)
    exact = tiny(name, torch.bfloat16).float()  # the same rounded weights, computed in float32
    decoder = build_decoder(half, rounding="none")
    assert decoder.linear_formats == {"bfloat16/bfloat16": 4 * 7 + 1}
    ours = theirs = 0.0
    for prompt, got in zip(PROMPTS, schedule(decoder, PROMPTS, CHUNKS, torch.bfloat16)):
        expected = eager(exact, prompt)
        ours += float((got - expected).norm())
        theirs += float((eager(half, prompt) - expected).norm())
    assert ours < theirs
    assert model.dtype == torch.float32


SAME_BITS = [name for name in ARCHITECTURES if name not in ("gemma2", "olmo2")]
"""Gemma 2 caps its scores, which torch's own attention does not do; OLMo 2 rotates in float32."""


@pytest.mark.parametrize("name", SAME_BITS)
def test_bfloat16_has_the_bits_of_transformers(name):
    """Prompts of whole tiles and of a few tokens, run together, each in one piece as transformers runs it."""
    half = tiny(name, torch.bfloat16)
    half.set_attn_implementation("sdpa")
    decoder = build_decoder(half)
    if not matches_torch():
        pytest.skip("torch on this machine sums in an order that the kernels do not know")
    for prompt, got in zip(PROMPTS, schedule(decoder, PROMPTS, [[len(p) for p in PROMPTS]], torch.bfloat16)):
        assert torch.equal(got, eager(half, prompt))


def test_threads_do_not_change_results():
    decoder = build_decoder(tiny("gemma3"))
    alone = schedule(decoder, PROMPTS, CHUNKS)
    set_num_threads(3)
    for a, b in zip(alone, schedule(decoder, PROMPTS, CHUNKS)):
        assert torch.equal(a, b)


def test_portable_code_agrees(monkeypatch):
    model = tiny("gemma2")
    native = schedule(build_decoder(model), PROMPTS, CHUNKS)
    monkeypatch.setenv("LLMOPT_KERNELS_ISA", "portable")
    for a, b in zip(native, schedule(build_decoder(model), PROMPTS, CHUNKS)):
        assert torch.allclose(a, b, atol=2e-4, rtol=1e-4)


class Packed(nn.Module):
    """A linear layer with the packed layers' protocol, computing from its codes."""

    def __init__(self, linear, bits, group_size, symmetric):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.bias = linear.bias
        w = linear.weight.detach().view(self.out_features, -1, group_size)
        top, low, high = 2**bits - 1, w.amin(-1), w.amax(-1)
        if symmetric:
            scales, zeros = w.abs().amax(-1) / (2 ** (bits - 1) - 0.5), None
            codes = (w / scales.unsqueeze(-1) + 2 ** (bits - 1)).round().clamp(0, top)
        else:
            scales = (high - low) / top
            zeros = (-low / scales).round().clamp(0, top)
            codes = (w / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, top)
            zeros = zeros.to(torch.uint8)
        self.state = (codes.to(torch.uint8).view_as(linear.weight), scales, zeros, bits, group_size)

    def quant_state(self):
        from types import SimpleNamespace

        return SimpleNamespace(**dict(zip(("codes", "scales", "zeros", "bits", "group_size"), self.state)))

    def forward(self, x):
        codes, scales, zeros, bits, _ = self.state
        zero = 2 ** (bits - 1) if zeros is None else zeros.float().unsqueeze(-1)
        grouped = codes.view(self.out_features, scales.shape[1], -1).float()
        weight = (grouped - zero) * scales.unsqueeze(-1)
        return nn.functional.linear(x, weight.view(self.out_features, -1), self.bias)


def quantize(model):
    """Different bits, group sizes and symmetry in different places."""
    choices = [(4, 32, True), (4, 32, False), (8, 32, True), (3, 32, True)]
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    for i, (name, module) in enumerate(linears):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Packed(module, *choices[i % 4]))
    return model


@pytest.mark.parametrize("name", ["llama-tied-bias", "gemma3"])
def test_packed_linears(name):
    model = quantize(tiny(name))
    decoder = build_decoder(model)
    assert decoder.linear_formats == {"int4/float32": 21, "int8/float32": 7, "float32/float32": 1}
    for prompt, got in zip(PROMPTS, schedule(decoder, PROMPTS, CHUNKS)):
        expected = eager(model, prompt)
        assert (got - expected).abs().max() < 2e-5 * max(1.0, expected.abs().max())
    fast = build_decoder(model, activation="int8", lm_head="int8")
    assert fast.linear_formats == {"int4/int8": 21, "int8/int8": 8}
    for prompt, got in zip(PROMPTS, schedule(fast, PROMPTS, CHUNKS)):
        expected = eager(model, prompt)
        assert (got - expected).norm() < 0.15 * expected.norm()


def test_options_release_and_bytes():
    model = tiny("llama")
    expected = eager(model, PROMPTS[0])
    plain = build_decoder(model)
    decoder = build_decoder(model, weights="int8", lm_head="int4", activation="int8", release=True)
    assert decoder.linear_formats == {"int8/int8": 28, "int4/int8": 1}
    assert decoder.weight_bytes < plain.weight_bytes / 3
    assert model.model.layers[0].mlp.up_proj.weight.numel() == 0
    (got,) = schedule(decoder, PROMPTS[:1], [(50,)])
    assert (got - expected).norm() < 0.3 * expected.norm()
    assert decoder.proof.relative_error < decoder.proof.limit
    with pytest.raises(ValueError, match="lm_head must be"):
        DecoderOptions(lm_head="int3")


def test_logit_rows_and_rope_growth():
    model = tiny("llama", max_position_embeddings=9000)
    decoder = build_decoder(model)
    decoder.allocate_kv(4, 32, torch.float32)
    args = (PROMPTS[2], torch.arange(37), torch.arange(37), [0, 37], [37], [[0, 1]])
    every = decoder.forward(*args, torch.arange(37))
    assert torch.equal(decoder.forward(*args, [36, 5, 36]), every[[36, 5, 36]])
    assert decoder.forward(*args, []).shape == (0, 131)
    out = torch.empty(1, 131)
    assert decoder.forward(*args, [0], out=out) is out and torch.equal(out, every[:1])
    shifted = decoder.forward(args[0], args[1] + 6000, *args[2:], torch.arange(37))  # RoPE is relative
    assert torch.allclose(shifted, every, atol=1e-2) and not torch.equal(shifted, every)


def test_bad_steps_are_refused():
    decoder = build_decoder(tiny("llama"))
    good = [[5, 6], [0, 1], [0, 1], [0, 2], [2], [[0]], [1]]
    with pytest.raises(ValueError, match="allocate_kv"):
        decoder.forward(*good)
    decoder.allocate_kv(2, 32, torch.float32)
    decoder.forward(*good)
    for index, value, message in [
        (0, [5, 131], "vocabulary"), (1, [0, -1], "rope"), (2, [0, 64], "slot"), (3, [0, 3], "starts"),
        (4, [1], "starts"), (4, [33], "block"), (5, [[2]], "block"), (6, [2], "logit row"), (1, [0], "positions"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            decoder.forward(*good[:index], value, *good[index + 1 :])


def test_unknown_models_are_refused_with_the_reason():
    small = {k: SMALL[k] for k in ("vocab_size", "num_hidden_layers")}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=96, n_head=6, n_layer=2, vocab_size=131))
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=2))
    cohere = transformers.CohereForCausalLM(transformers.CohereConfig(**{**SMALL, **small}))
    dynamic = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    for model, reason in [(gpt2, "lm_head"), (mixtral, "mlp"), (cohere, "norm"), (dynamic, "dynamic")]:
        with pytest.raises(UnsupportedModel, match=reason):
            build_decoder(model.eval())
    odd = tiny("llama")
    odd.model.layers[1].adapter = nn.Linear(4, 4)
    with pytest.raises(UnsupportedModel, match="adapter"):
        build_decoder(odd)
    scaled = tiny("llama")
    scaled.model.layers[0].forward = lambda hidden_states, **_: hidden_states * 1.5
    with pytest.raises(UnsupportedModel, match="differ"):
        build_decoder(scaled)
