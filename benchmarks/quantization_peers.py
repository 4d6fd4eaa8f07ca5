"""One peer quantizes one model, in the peer's own venv; the driver is `quantization.py`.

    python benchmarks/quantization_peers.py KIND JOB.json

The job names `model` (folder), `out` (folder to make), `tokens` (JSON file of calibration sequences, lists of ids),
`bits`, `group_size` (-1: one scale a channel), `symmetric`, and `options` of the method. Written to `out`: the
checkpoint as the peer saves it, and `dense.safetensors`: what its quantized layers stand for, as plain weights in
float32, and every other tensor that the method changed. The last line printed is JSON: seconds of the quantizing call
alone, bytes of the checkpoint's weights, version, and what the process had used when the checkpoint was saved: reading
it again as plain weights is this benchmark's need, not the peer's.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def sequences(job: Job) -> list[list[int]]:
    return json.loads(Path(job["tokens"]).read_text())


def save_dense(module: Any, source: Path, out: Path) -> None:
    """All tensors of a plain model that differ from the source's, in float32."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    stored: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    changed = {}
    for name, tensor in module.state_dict().items():
        value = tensor.detach().to(torch.float32)
        if name not in stored or not torch.equal(value, stored[name].to(torch.float32)):
            if name == "lm_head.weight" and name not in stored:
                continue  # tied
            changed[name] = value.contiguous().clone()
    save_file(changed, out / "dense.safetensors")


def stored_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors") if f.name != "dense.safetensors")


def spent() -> dict[str, float]:
    """CPU seconds and peak resident memory, in 10^6 bytes, of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss * 1024 / 1e6}


def gptqmodel(job: Job) -> dict[str, Any]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    import transformers
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    out = Path(job["out"])
    config = QuantizeConfig(bits=job["bits"], group_size=job["group_size"], sym=job["symmetric"], **job["options"])
    model = GPTQModel.load(job["model"], config)
    data = [{"input_ids": torch.tensor([s]), "attention_mask": torch.ones(1, len(s), dtype=torch.long)}
            for s in sequences(job)]  # fmt: skip
    start = time.perf_counter()
    model.quantize(data, batch_size=1)
    seconds = time.perf_counter() - start
    model.save(str(out))
    used = spent()
    del model
    loaded = GPTQModel.load(str(out), backend=BACKEND.TORCH, device="cpu")
    plain = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    for name, layer in loaded.model.named_modules():
        if hasattr(layer, "dequantize_weight"):
            weight = layer.dequantize_weight().to(torch.float32).t()
            target = plain.get_parameter(f"{name}.weight")
            target.data = weight[: target.shape[0], : target.shape[1]].contiguous()
    save_dense(plain, Path(job["model"]), out)
    return {**used, "quantize_s": seconds, "bytes": stored_bytes(out),
            "version": f"GPTQModel {version('gptqmodel')}"}  # fmt: skip


def llmcompressor(job: Job) -> dict[str, Any]:
    import torch
    import transformers
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import GPTQModifier

    out, found = Path(job["out"]), sequences(job)
    channel = job["group_size"] == -1
    weights = {"num_bits": job["bits"], "type": "int", "symmetric": job["symmetric"], "dynamic": False,
               "strategy": "channel" if channel else "group",
               "group_size": None if channel else job["group_size"]}  # fmt: skip
    options = dict(job["options"])
    if (actorder := options.pop("actorder", None)) is not None:
        weights["actorder"] = actorder
    if not torch.accelerator.is_available():  # its AWQ pins memory all the same, which stops it
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]
    kind = {"gptq": GPTQModifier, "awq": AWQModifier}[options.pop("method")]
    recipe = kind(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"], **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    data = Dataset.from_dict({"input_ids": found, "attention_mask": [[1] * len(s) for s in found]})
    start = time.perf_counter()
    oneshot(
        model=model, dataset=data, recipe=recipe, max_seq_length=max(map(len, found)),
        num_calibration_samples=len(found), shuffle_calibration_samples=False,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    model.save_pretrained(str(out), save_compressed=True)
    used = spent()
    del model
    from transformers.utils.quantization_config import CompressedTensorsConfig

    plain = transformers.AutoModelForCausalLM.from_pretrained(
        str(out), dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    names = set(transformers.AutoModelForCausalLM.from_pretrained(job["model"]).state_dict())
    with torch.no_grad():  # a first call, for versions that decompress then
        plain(torch.tensor([[1, 2, 3]]))
    for module in plain.modules():
        for name in [n for n, _ in module.named_parameters(recurse=False)] + [n for n, _ in module.named_buffers()]:
            if name.startswith(("weight_scale", "weight_zero", "weight_g_idx", "weight_shape")):
                delattr(module, name)
    missing = names - set(plain.state_dict())
    if missing:
        raise RuntimeError(f"not decompressed: {sorted(missing)[:3]}")
    save_dense(plain, Path(job["model"]), out)
    return {**used, "quantize_s": seconds, "bytes": stored_bytes(out),
            "version": f"llm-compressor {version('llmcompressor')}"}  # fmt: skip


def autoround(job: Job) -> dict[str, Any]:
    import torch
    import transformers
    from auto_round import AutoRound

    out, found = Path(job["out"]), sequences(job)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")

    class Batches(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(found)

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = torch.tensor(found[index])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    start = time.perf_counter()
    rounder = AutoRound(
        model, tokenizer, bits=job["bits"], group_size=job["group_size"], sym=job["symmetric"],
        dataset=torch.utils.data.DataLoader(Batches(), batch_size=8), nsamples=len(found), seqlen=len(found[0]),
        device_map="cpu", **job["options"],
    )  # fmt: skip
    rounder.quantize_and_save(str(out), format="fake")
    seconds, used = time.perf_counter() - start, spent()
    written = next(p.parent for p in sorted(out.rglob("config.json")))
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(written), dtype=torch.float32)
    save_dense(plain, Path(job["model"]), out)
    return {**used, "quantize_s": seconds, "bytes": 0,
            "version": f"AutoRound {version('auto-round')}"}  # fmt: skip


def bitsandbytes(job: Job) -> dict[str, Any]:
    import bitsandbytes as bnb
    import torch
    import transformers

    out = Path(job["out"])
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, **job["options"]
    )
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], quantization_config=config)
    seconds = time.perf_counter() - start
    model.save_pretrained(str(out))
    used = spent()
    plain = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    for name, layer in model.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight: Any = layer.weight
            dense = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
            plain.get_submodule(name).weight.data = dense.to(torch.float32)
    save_dense(plain, Path(job["model"]), out)
    return {**used, "quantize_s": seconds, "bytes": stored_bytes(out),
            "version": f"bitsandbytes {version('bitsandbytes')}"}  # fmt: skip


KINDS = {
    "gptqmodel": gptqmodel, "llmcompressor": llmcompressor, "autoround": autoround, "bnb": bitsandbytes,
}  # fmt: skip

if __name__ == "__main__":
    here = Path(__file__).resolve().parent  # the file `quantization.py` beside this one is not for the peers to import
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    job = json.loads(Path(sys.argv[2]).read_text())
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    print("\n" + json.dumps(KINDS[sys.argv[1]](job)), flush=True)
