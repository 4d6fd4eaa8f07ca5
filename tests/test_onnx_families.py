"""Every decoder family in both flavours: float32 parity with torch in prefill and decode, the same text in batches."""

from __future__ import annotations

from pathlib import Path

import llmopt
import pytest
import torch
from llmopt.tests.onnx_models import FAMILIES, export, save_family, write_graph

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

PROMPTS = [
    "a", "The sea", "Once upon a time", "He said that", "water", "It was a dark night", "two three four", "Why",
    "In the beginning was the word", "the", "Rain fell all day long, and the river rose", "go", "My dear friend,",
    "No one", "The king and the queen sat down to eat when a beggar came to the gate", "end",
]  # fmt: skip


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Name → folder of a tiny model, made once."""
    base, made = tmp_path_factory.mktemp("families"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, base / name)
        return made[name]

    return get


def pairs():
    return [(name, flavor) for name in FAMILIES for flavor in ("genai", "ort")]


@pytest.mark.parametrize(("name", "flavor"), pairs())
def test_parity_and_text(name, flavor, families, tmp_path):
    source = families(name)
    record, context = export(source, tmp_path / "out", flavor=flavor)
    parity = record["parity"]
    assert parity["prefill_max_difference"] < 1e-4 and parity["decode_max_difference"] < 1e-4
    assert parity["greedy_differing"] == 0 and parity["greedy_equal"] + parity["greedy_ties"] == 32
    assert not [note for note in context.notes if note["kind"] == "fallback"]
    with (
        llmopt.load(tmp_path / "out") as graph,
        llmopt.load(source, engine="static", dtype="float32", device="cpu") as torch_llm,
    ):
        assert graph.backend == "onnxruntime"
        found = graph.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
        expected = torch_llm.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert len({tuple(one.token_ids) for one in found}) > 8  # not one text for all


def test_optimum_names(families, tmp_path):
    import onnx

    export(families("llama"), tmp_path / "out", flavor="ort")
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    names = [value.name for value in model.graph.input]
    assert names[0] == "input_ids" and {"attention_mask", "position_ids"} < set(names)
    assert {f"past_key_values.{i}.{kind}" for i in (0, 1) for kind in ("key", "value")} < set(names)
    assert {value.name for value in model.graph.output} == {
        "logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"
    }  # fmt: skip
    assert {node.domain for node in model.graph.node} == {""}


def test_genai_config(families, tmp_path):
    import json

    export(families("gemma3"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    decoder = config["model"]["decoder"]
    assert config["model"]["type"] == "gemma3_text" and config["model"]["eos_token_id"] == 1
    assert (decoder["head_size"], decoder["num_key_value_heads"], decoder["num_hidden_layers"]) == (32, 2, 3)
    assert config["search"]["max_length"] == config["model"]["context_length"] == 256


@pytest.mark.parametrize(
    ("name", "flavor", "dtype"),
    [("llama", "genai", "bfloat16"), ("llama", "genai", "float16"), ("llama", "ort", "float16")]
    + [("gpt2", flavor, dtype) for flavor in ("genai", "ort") for dtype in ("bfloat16", "float16")],
)
def test_other_dtypes(name, flavor, dtype, families, tmp_path):
    record, context = export(families(name), tmp_path / "out", flavor=flavor, dtype=dtype)
    size = (tmp_path / "out" / "model.onnx_data").stat().st_size
    write_graph(families(name), tmp_path / "plain", flavor=flavor)
    assert size < 0.6 * (tmp_path / "plain" / "model.onnx_data").stat().st_size
    if dtype == "bfloat16":  # computed in float32 from rounded weights, and the reference is rounded alike
        assert record["parity"]["prefill_max_difference"] < 1e-4
        assert any("rounded to bfloat16" in note["message"] for note in context.notes)
    else:
        assert 0 < record["parity"]["mean_kl"] < 1e-4
    with llmopt.load(tmp_path / "out") as llm:
        assert len(llm.generate("The sea", max_new_tokens=4, ignore_eos=True).token_ids) == 4


@pytest.mark.parametrize(
    ("name", "fused"), [("llama", "SkipSimplifiedLayerNormalization"), ("gpt2", "SkipLayerNormalization")]
)
def test_norms_are_fused_where_a_graph_need_not_be_exact(name, fused, families, tmp_path):
    import onnx

    found = []
    for number, options in enumerate(({}, {"activations": "int8", "lm_head": "int8"})):
        out = write_graph(families(name), tmp_path / str(number), flavor="genai", **options)
        graph = onnx.load(out / "model.onnx", load_external_data=False).graph
        kinds = [node.op_type for node in graph.node]
        found.append((kinds.count(fused), kinds.count("Pow"), kinds.count("Sqrt")))
    norms = 5  # two of each layer, and the last
    assert found[0] == (0, 0, norms) and found[1][0] == norms - 1


def test_weights_inside_the_graph(families, tmp_path):
    record, _ = export(families("llama"), tmp_path / "out", external_data=False)
    assert not (tmp_path / "out" / "model.onnx_data").exists()
    assert record["parity"]["prefill_max_difference"] < 1e-4


@pytest.mark.parametrize(("flavor", "dtype"), [("genai", "bfloat16"), ("ort", "float32")])
def test_simplified(flavor, dtype, families, tmp_path):
    """Fewer nodes, the same bytes of weights, the same answers; what `load` reads from the graph is still there."""
    source = save_family("llama", tmp_path / "source", dtype)
    record, _ = export(source, tmp_path / "out", flavor=flavor, dtype=dtype, simplify=True)
    write_graph(source, tmp_path / "plain", flavor=flavor, dtype=dtype)
    assert 0 < record["nodes"]["after"] < record["nodes"]["before"] and record["parity"]["greedy_differing"] == 0
    sizes = [sum(file.stat().st_size for file in (tmp_path / n).glob("model.onnx*")) for n in ("out", "plain")]
    assert abs(sizes[0] - sizes[1]) < 0.1 * sizes[1] and not (tmp_path / "out" / "simplified").exists()
    texts = []
    for name in ("out", "plain"):
        with llmopt.load(tmp_path / name) as llm:
            assert llm.runner.session.metadata["llmopt.flavor"] == flavor
            texts.append(llm.generate(PROMPTS[:3], max_new_tokens=8, ignore_eos=True))
    assert texts[0] == texts[1]


def test_a_model_that_no_graph_is_written_for(tmp_path):
    import transformers
    from llmopt.tests.conftest import build_tokenizer

    ids = {"bos_token_id": 0, "eos_token_id": 1}
    config = transformers.BloomConfig(vocab_size=400, hidden_size=32, n_layer=1, n_head=2, **ids)
    transformers.BloomForCausalLM(config).to(torch.float32).save_pretrained(tmp_path / "bloom")
    build_tokenizer().save_pretrained(tmp_path / "bloom")
    with pytest.raises(llmopt.UsageError, match="no graph is written for BloomForCausalLM"):
        export(tmp_path / "bloom", tmp_path / "out")


@pytest.mark.parametrize("name", ["gpt2", "olmo2"])
def test_a_type_that_genai_has_not_or_has_in_another_form(name):
    import transformers
    from llmopt.exporters.onnx.attention import AttentionShape
    from llmopt.exporters.onnx.genai_config import genai_config

    config = transformers.AutoConfig.for_model(name)
    found = genai_config(config, transformers.GenerationConfig(), AttentionShape(12, 12, 64), 400, 256, [1])["model"]
    assert found["type"] == "decoder"
    assert found["decoder"]["num_hidden_layers"] == config.num_hidden_layers


def test_a_recipe_names_the_command(families, tmp_path):
    with pytest.raises(llmopt.UsageError, match="llmopt export ARTIFACT --format onnx"):
        llmopt.optimize(families("llama"), passes=["kv_cache"], exporter="onnx", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
