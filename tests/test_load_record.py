"""A second load goes by the record of the first: same answers, proved anew, no modeling code of transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.llm import LLM, load
from llmopt.runtime.load_record import MOST_RECORDS, LoadRecord, record_path
from llmopt.runtime.recorded_model import RecordedModel
from safetensors.torch import load_file, save_file

IDS = [5, 60, 9, 122, 17, 200, 31]
OPTIONS: dict[str, Any] = {"kv_cache_memory": 4 << 20}
HEAVY = (
    "transformers.modeling_utils", "transformers.generation.utils", "torch._dynamo",
    "torch._inductor", "torch.distributed.tensor", "accelerate", "compressed_tensors", "sympy", "triton", "scipy",
    "sklearn", "torchvision", "llguidance", "llmopt.passes", "llmopt.exporters", "llmopt.evaluation",
)  # fmt: skip


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Records of this test alone, compiled kernels of the whole session; one thread, as models are tiny."""
    from llmopt.runtime.kernels.build import NativeUnavailable, cache_dir
    from llmopt.runtime.kernels.build import load as load_kernels

    try:
        load_kernels()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    own = tmp_path / "cache"
    own.mkdir()
    for library in cache_dir().glob("kernels-*.so"):
        (own / library.name).symlink_to(library)
    monkeypatch.setenv("LLMOPT_CACHE_DIR", str(own))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield own / "loads"
    torch.set_num_threads(before)


def by_record(llm: LLM) -> bool:
    return any("by the record" in note["message"] for note in llm.notes)


def fallbacks(llm: LLM) -> list[str]:
    return [note["message"] for note in llm.notes if note["kind"] == "fallback"]


def logits(llm: LLM) -> torch.Tensor:
    """Of a prompt of seven tokens."""
    from llmopt.runtime.engine.plan import Row, StepPlan

    assert llm.runner is not None
    return llm.runner.execute(StepPlan((Row(0, 0, tuple(IDS), (1,), len(IDS)),))).clone()


def twice(folder: Path, **options: Any) -> torch.Tensor:
    """Load in full, then by record; both give the same logits, which are returned."""
    with load(folder, **OPTIONS, **options) as first:
        assert not by_record(first)
        want = logits(first)
    with load(folder, **OPTIONS, **options) as second:
        assert by_record(second), second.notes
        assert not fallbacks(second)
        assert torch.equal(logits(second), want)
        runner: Any = second.runner
        assert runner.decoder.proof.relative_error > 0
    return want


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def own_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()(torch.tensor([IDS])).logits[0].float()


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_logits(make_model: Callable[..., Path], tied: bool) -> None:
    folder = make_model(dtype="float32", tie_word_embeddings=tied, attention_bias=True, initializer_range=0.3)
    torch.testing.assert_close(twice(folder), own_logits(folder), atol=1e-4, rtol=1e-4)


def test_quantized_at_load(make_model: Callable[..., Path]) -> None:
    """The record does not depend on these options: it was made without them."""
    folder = make_model()
    with load(folder, **OPTIONS):
        pass
    for options in ({"weights": "int8"}, {"lm_head": "int4"}, {"weights": "int8", "activation": "int8"}):
        with load(folder, **OPTIONS, **options) as quick:
            assert by_record(quick)
            found = logits(quick)
            formats = quick.runner.decoder.linear_formats  # type: ignore[union-attr]
        with LLM.from_opened(quick._opened._whole, **OPTIONS, **options) as whole:  # type: ignore[attr-defined]
            assert whole.runner.decoder.linear_formats == formats  # type: ignore[union-attr]
            assert torch.equal(logits(whole), found)


def test_fused_projections(tmp_path: Path) -> None:
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=256, original_max_position_embeddings=256,
    )  # fmt: skip
    twice(with_tokenizer(Phi3ForCausalLM(config).bfloat16(), tmp_path / "phi3"))


def test_two_kinds_of_rope_and_scaled_embeddings(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=4, max_position_embeddings=256, sliding_window_pattern=2,
    )  # fmt: skip
    folder = with_tokenizer(Gemma3ForCausalLM(config), tmp_path / "gemma")
    torch.testing.assert_close(twice(folder), own_logits(folder), atol=1e-4, rtol=1e-4)


def with_tokenizer(model: Any, folder: Path) -> Path:
    spec = Path(__file__).with_name("conftest.py")
    namespace: dict[str, Any] = {"__file__": str(spec), "__name__": "conftest_copy"}
    exec(compile(spec.read_text(encoding="utf-8"), str(spec), "exec"), namespace)
    model.save_pretrained(folder)
    namespace["build_tokenizer"]().save_pretrained(folder)
    return folder


def test_packed_weights(packed_model: Path) -> None:
    twice(packed_model)
    with load(packed_model, **OPTIONS) as llm:
        assert by_record(llm)
        assert any(name.startswith("int4") for name in llm.runner.decoder.linear_formats)  # type: ignore[union-attr]


def test_the_proof_of_an_artifact_leaves_a_record(tiny_model: Path, tmp_path: Path, records: Path) -> None:
    """`optimize` opens what it wrote in a fresh process; after that the first load is quick."""
    import llmopt
    from llmopt.passes import Quantize

    out, quick = tmp_path / "artifact", {"windows": 1, "window_length": 64, "speed": False, "new_tokens": 4}
    llmopt.optimize(tiny_model, passes=[Quantize(method="rtn", bits=4, group_size=32)], out=out, evaluate=quick)
    with load(out, **OPTIONS) as llm:
        assert by_record(llm), (llm.notes, sorted(records.iterdir()))
        assert any(name.startswith("int4") for name in llm.runner.decoder.linear_formats)  # type: ignore[union-attr]


def test_text_ends_and_limits(tiny_model: Path) -> None:
    """What the handle knows and says is the same by either way."""
    prompts = ["Hello", [{"role": "user", "content": "Hi"}], IDS]

    def said(llm: LLM) -> list[object]:
        found = llm.generate(prompts, max_new_tokens=8)
        assert isinstance(found, list)
        facts = [llm.vocab_size, llm.context_length, llm.backend, repr(llm), llm.tokenizer.chat_template]
        return [*((one.token_ids, one.text, one.finish_reason) for one in found), *facts]

    with load(tiny_model, **OPTIONS) as first:
        want, eos, held = said(first), first._opened.eos_token_ids, first.weight_bytes
    with load(tiny_model, **OPTIONS) as second:
        assert by_record(second)
        assert said(second) == want
        assert second._opened.eos_token_ids == eos == [1]
        assert abs(second.weight_bytes - held) < 0.05 * held
        with pytest.raises(UsageError, match="context"):
            second.generate([3] * 600)
        assert "_whole" not in vars(second._opened)
        module = second.module
        assert type(module).__name__ == "LlamaForCausalLM" and module is second.module
        assert all(parameter.numel() for parameter in module.parameters())


def test_heavy_modules_stay_out(tiny_model: Path) -> None:
    """A fresh process that loads by record and answers imports none of them; the first load needs the modeling code."""
    script = (
        "import json, sys, llmopt\n"
        f"with llmopt.load({str(tiny_model)!r}, **{OPTIONS!r}) as llm:\n"
        f"    text = llm.generate({IDS!r}, max_new_tokens=4).token_ids\n"
        f"print(json.dumps([text, [n for n in {HEAVY!r} if n in sys.modules]]))\n"
    )

    def run() -> tuple[list[int], list[str]]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        return tuple(json.loads(done.stdout.splitlines()[-1]))

    text, modules = run()
    assert "transformers.modeling_utils" in modules
    assert run() == (text, [])


def test_other_weights_are_opened_anew(make_model: Callable[..., Path]) -> None:
    folder = make_model(dtype="float32", initializer_range=0.3)
    before = twice(folder)
    rewrite(folder, lambda tensors: {name: tensor.flip(-1) for name, tensor in tensors.items()})
    with load(folder, **OPTIONS) as llm:
        assert not by_record(llm) and not fallbacks(llm)
        assert not torch.equal(logits(llm), before)
    torch.testing.assert_close(twice_after(folder), own_logits(folder), atol=1e-4, rtol=1e-4)


def twice_after(folder: Path) -> torch.Tensor:
    with load(folder, **OPTIONS) as llm:
        assert by_record(llm)
        return logits(llm)


def test_a_name_stands_for_contents(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_model, folder)
    first = record_path(folder, "auto")
    assert record_path(folder, "auto") == first
    assert record_path(folder, "float32") != first
    hashes = {"model.safetensors": "1"}
    assert record_path(folder, "auto", hashes) == record_path(tiny_model, "auto", hashes)
    assert record_path(folder, "auto", hashes) != record_path(folder, "auto", {"model.safetensors": "2"})
    (folder / "README.md").write_text("nothing that matters")
    assert record_path(folder, "auto") == first
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<bos>"}))
    assert record_path(folder, "auto") != first
    monkeypatch.setattr("llmopt.runtime.load_record._surroundings", lambda: ("another torch",))
    assert record_path(tiny_model, "auto", hashes) != record_path(folder, "auto", hashes)


def test_weights_that_are_not_the_records_fail_its_proof(make_model: Callable[..., Path], records: Path) -> None:
    """A record under the right name whose logits are another model's: told, opened in full, and replaced."""
    folder = make_model(dtype="float32", initializer_range=0.3)
    want = twice(folder)
    (file,) = records.glob("*.safetensors")
    record = LoadRecord.read(file)
    assert record is not None
    record.tensors["expected"] = record.tensors["expected"].flip(-1)
    record.save(file)
    with load(folder, **OPTIONS) as llm:
        assert not by_record(llm)
        assert "did not hold" in fallbacks(llm)[0] and "relative error" in fallbacks(llm)[0]
        assert torch.equal(logits(llm), want)
    assert torch.equal(twice_after(folder), want)


@pytest.mark.parametrize("damage", ["cut", "empty", "field"])
def test_a_damaged_record_is_replaced(tiny_model: Path, records: Path, damage: str) -> None:
    want = twice(tiny_model)
    (file,) = records.glob("*.safetensors")
    if damage == "field":
        record = LoadRecord.read(file)
        assert record is not None
        record.structure["layers"][0]["unknown"] = 1
        record.save(file)
    else:
        file.write_bytes(file.read_bytes()[: 100 if damage == "cut" else 0])
    with load(tiny_model, **OPTIONS) as llm:
        assert not by_record(llm)
        assert bool(fallbacks(llm)) == (damage == "field")
    assert torch.equal(twice_after(tiny_model), want)


def test_who_goes_without(tiny_model: Path, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice(tiny_model)
    for options in ({"runner": "eager"}, {"engine": "static"}, {"attention": "sdpa"}, {"dtype": "float32"}):
        given = {} if options.get("engine") == "static" or "attention" in options else OPTIONS
        with load(tiny_model, **given, **options) as llm:
            assert not by_record(llm), options
    with pytest.raises(UsageError, match=r"no option 'num_thread'.*num_threads"):
        load(tiny_model, num_thread=1)
    with pytest.raises(RunError, match="max_model_len 9999"):
        load(tiny_model, engine="native", runner="native", max_model_len=9999)
    monkeypatch.setenv("LLMOPT_LOAD_RECORDS", "0")
    kept = sorted(records.iterdir())
    with load(tiny_model, **OPTIONS) as llm:
        assert not by_record(llm)
    assert sorted(records.iterdir()) == kept


def test_a_damaged_artifact_is_refused(make_model: Callable[..., Path]) -> None:
    import hashlib

    folder = make_model()
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    (folder / "llmopt.json").write_text(json.dumps({"files": files}))
    twice(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(RunError, match="changed or damaged"):
        load(folder, **OPTIONS)


def test_a_first_load_that_fails_late_still_runs_natively(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that do not give the module's logits (here: a broken reader) are found out; the module is packed."""
    from llmopt.runtime import record_structure

    want = twice(tiny_model)
    read = record_structure.read_stored
    monkeypatch.setattr(record_structure, "read_stored", lambda stored: read(stored).flip(0))
    monkeypatch.setattr("llmopt.runtime.load_record._surroundings", lambda: ("no record yet",))
    with load(tiny_model, **OPTIONS) as llm:
        assert not by_record(llm) and type(llm.runner).__name__ == "NativeRunner"
        assert torch.equal(logits(llm), want)


def test_a_cache_that_cannot_be_written_is_noted(tiny_model: Path, records: Path) -> None:
    records.write_text("a file where the folder should be")
    with load(tiny_model, **OPTIONS) as llm:
        assert any("no record of this load was kept" in note["message"] for note in llm.notes)
        assert llm.generate(IDS, max_new_tokens=2)


def test_old_records_go(tiny_model: Path, records: Path) -> None:
    twice(tiny_model)
    (file,) = records.iterdir()
    for number in range(MOST_RECORDS + 3):
        old = records / f"{number}.safetensors"
        old.write_bytes(b"")
        os.utime(old, (number, number))
    record = LoadRecord.read(file)
    assert record is not None
    record.save(file)
    names = {path.name for path in records.iterdir()}
    assert len(names) == MOST_RECORDS and file.name in names and "3.safetensors" not in names


def test_a_recorded_model_is_an_opened_model(tiny_model: Path) -> None:
    twice(tiny_model)
    with load(tiny_model, **OPTIONS) as llm:
        opened = llm._opened
        assert isinstance(opened, RecordedModel)
        assert (str(opened.device), opened.architecture) == ("cpu", "LlamaForCausalLM")
        assert opened.generation_config.eos_token_id == 1
