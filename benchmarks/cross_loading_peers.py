"""The workers of `cross_loading.py`: one process makes or reads one checkpoint, in the venv of the tool that does it.

    python benchmarks/cross_loading_peers.py KIND JOB.json

Makers (`make-*`) take `model`, `out`, `tokens` (JSON file of calibration sequences) and `options`. Readers take
`model`, `prompts` (lists of ids), `new` (tokens to continue each by, greedy, end-of-text ignored), `window` (ids that
are scored) and `dtype`. The last line printed is JSON: of a reader `tokens` (lists of ids), `chosen` (log-probability
of each token of the window after the first), `top` (most likely token there) and `about`; with `logits` in the job, a
path, its full log-probabilities are written there, float32 [window - 1, vocabulary].
Only the standard library is imported before the worker starts, so that any venv can run this file.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def sequences(job: Job) -> list[list[int]]:
    return json.loads(Path(job["tokens"]).read_text())


def scored(job: Job, logits: Any, tokens: list[list[int]], **about: str) -> dict[str, Any]:
    """A reader's answer from its logits, float [window - 1, vocabulary]."""
    import torch

    found = torch.log_softmax(logits.float(), -1)
    if job.get("logits"):
        import numpy

        numpy.save(job["logits"], found.numpy())
    chosen = found.gather(1, torch.tensor(job["window"][1:])[:, None])[:, 0]
    return {"tokens": tokens, "chosen": chosen.tolist(), "top": found.argmax(-1).tolist(), "about": about}


def torch_model(job: Job, model: Any, **about: str) -> dict[str, Any]:
    """What a transformers model answers."""
    import torch

    tokens = []
    model.generation_config.eos_token_id = None  # `min_new_tokens` would forbid it, where others write it and go on
    with torch.inference_mode():
        for prompt in job["prompts"]:
            ids = torch.tensor([prompt])
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["new"], do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
            tokens.append(out[0, len(prompt) :].tolist())
        logits = model(input_ids=torch.tensor([job["window"]]), use_cache=False).logits[0, :-1]
    return scored(job, logits, tokens, torch=torch.__version__, **about)


# -- makers


def make_gptqmodel(job: Job) -> dict[str, Any]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(job["model"], QuantizeConfig(**job["options"]))
    data = [{"input_ids": torch.tensor([s]), "attention_mask": torch.ones(1, len(s), dtype=torch.long)}
            for s in sequences(job)]  # fmt: skip
    model.quantize(data, batch_size=1)
    model.save(job["out"])
    return {"about": {"GPTQModel": version("gptqmodel")}}


def make_llmcompressor(job: Job) -> dict[str, Any]:
    import transformers
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    found, options = sequences(job), job["options"]
    weights = {"num_bits": options["bits"], "type": "int", "symmetric": True, "strategy": "group",
               "group_size": options["group_size"]}  # fmt: skip
    recipe = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    data = Dataset.from_dict({"input_ids": found, "attention_mask": [[1] * len(s) for s in found]})
    oneshot(
        model=model, dataset=data, recipe=recipe, max_seq_length=max(map(len, found)),
        num_calibration_samples=len(found), shuffle_calibration_samples=False,
    )  # fmt: skip
    model.save_pretrained(job["out"], save_compressed=True)
    transformers.AutoTokenizer.from_pretrained(job["model"]).save_pretrained(job["out"])
    return {"about": {"llm-compressor": version("llmcompressor")}}


def make_llmopt(job: Job) -> dict[str, Any]:
    """Quantize and export, without the rest of a run: what is here proved by others needs no proof of its own."""
    from llmopt.exporters.huggingface import HuggingFaceExporter
    from llmopt.optimizer.base import Context
    from llmopt.optimizer.calibration import Calibration
    from llmopt.optimizer.source_model import load_source
    from llmopt.optimizer.sources import describe, resolve
    from llmopt.passes.quantize import Quantize

    options, out = job["options"], Path(job["out"])
    source = resolve(job["model"])
    model = load_source(source)
    calibration = Calibration(model.tokenizer, options["text"], options["num_samples"], options["sequence_length"])
    context = Context(describe(source), calibration, 0, out)
    Quantize(**options["quantize"]).run(model, context)
    out.mkdir(parents=True)
    HuggingFaceExporter(**options["export"]).export(model, out, context)
    return {"about": {"llmopt": version("llmopt")}}


# -- readers


def read_llmopt(job: Job, **options: Any) -> dict[str, Any]:
    import llmopt
    import torch
    from llmopt.evaluation.logits import runner_logits

    window = torch.tensor([job["window"]])
    with llmopt.load(job["model"], device="cpu", dtype=job["dtype"], **options) as llm:
        engine: Any = llm.runner
        if engine is None:  # as `torch_model` does: evaluation would take float32 products on some processors
            with torch.inference_mode():
                logits = llm.module(input_ids=window, use_cache=False).logits[0, :-1]
        else:
            ((_, logits),) = runner_logits(engine, window)
            logits = logits.clone()
        found: Any = llm.generate(job["prompts"], max_new_tokens=job["new"], ignore_eos=True, temperature=0.0)
        runner = "static engine" if engine is None else type(engine).__name__
    return scored(job, logits, [one.token_ids for one in found], llmopt=version("llmopt"), runner=runner)


def read_llmopt_static(job: Job) -> dict[str, Any]:
    """The same by our torch layers."""
    return read_llmopt(job, engine="static")


def read_llmopt_emulated(job: Job) -> dict[str, Any]:
    """The same with the arithmetic of compressed-tensors' emulation, one prompt at a time."""
    return read_llmopt(job, engine="static", emulate=True, max_batch=1)


def read_transformers(job: Job) -> dict[str, Any]:
    os.environ.setdefault("GPTQ_TORCH_CACHE_WEIGHTS", "1")  # for optimum, which runs GPTQModel's layers
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
    return torch_model(job, model, transformers=transformers.__version__)


def read_gptqmodel(job: Job) -> dict[str, Any]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    os.environ.setdefault("GPTQ_TORCH_CACHE_WEIGHTS", "1")  # dequantize once, not at every token
    import torch
    from gptqmodel import BACKEND, GPTQModel

    kept = getattr(torch, job["dtype"])
    model = GPTQModel.load(job["model"], backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=kept)
    return torch_model(job, model.model.eval(), GPTQModel=version("gptqmodel"))


def read_gptqmodel_dense(job: Job) -> dict[str, Any]:
    """The weights as GPTQModel dequantizes them, in a plain transformers model: its arithmetic without its kernels."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    import transformers
    from gptqmodel import BACKEND, GPTQModel

    loaded = GPTQModel.load(job["model"], backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=torch.float16)
    dense = transformers.AutoModelForCausalLM.from_pretrained(job["source"], dtype=getattr(torch, job["dtype"])).eval()
    count = 0
    for name, layer in loaded.model.named_modules():
        if hasattr(layer, "dequantize_weight"):
            layer.scales = layer.scales.float()
            weight = layer.dequantize_weight().t()
            target = dense.get_submodule(name).weight
            target.data = weight[: target.shape[0], : target.shape[1]].to(target.dtype).contiguous()
            count += 1
    return torch_model(job, dense, GPTQModel=version("gptqmodel"), layers=str(count))


def read_vllm(job: Job) -> dict[str, Any]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    llm = vllm.LLM(job["model"], dtype=job["dtype"], max_model_len=1024, max_num_seqs=8, max_logprobs=-1)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["new"], ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], params, use_tqdm=False)
    once = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (window,) = llm.generate([{"prompt_token_ids": job["window"]}], once, use_tqdm=False)
    places = list(zip(window.prompt_logprobs[1:], job["window"][1:]))
    if job.get("logits"):
        _save_vllm(llm, job)
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in found],
        "chosen": [place[token].logprob for place, token in places],
        "top": [next(token for token, entry in place.items() if entry.rank == 1) for place, _ in places],
        "about": {"vllm": vllm.__version__},
    }


def _save_vllm(llm: Any, job: Job) -> None:
    """Full log-probabilities after each token of the window: vLLM makes an object of every one."""
    import numpy
    import vllm

    every = vllm.SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )  # fmt: skip
    (found,) = llm.generate([{"prompt_token_ids": job["window"]}], every, use_tqdm=False)
    flat = found.prompt_logprobs
    rows = []
    for start, end in list(zip(flat.start_indices, flat.end_indices))[1:]:
        ids = numpy.array(flat.token_ids[start:end])
        row = numpy.full(ids.max() + 1, numpy.nan, numpy.float32)
        row[ids] = flat.logprobs[start:end]
        rows.append(row)
    numpy.save(job["logits"], numpy.stack(rows))


KINDS = {
    name.replace("_", "-"): made
    for name, made in list(globals().items())
    if name.startswith(("make_", "read_")) and callable(made)
}

if __name__ == "__main__":
    here = Path(__file__).resolve().parent  # no file beside this one is for the peers to import
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    job = json.loads(Path(sys.argv[2]).read_text())
    answer = KINDS[sys.argv[1]](job)
    print("\n" + json.dumps(answer), flush=True)
