"""The workers of `engine.py`: one process holds one system and answers JSON lines; and the makers of the peers' models.

    python benchmarks/engine_peers.py KIND '{"model": …, "options": {…}}'      # a worker, in the peer's own venv
    python benchmarks/engine_peers.py make-gguf SRC.gguf OUT.gguf              # every matrix, the head too, as Q4_0
    python benchmarks/engine_peers.py make-w8a8 SRC_FOLDER OUT_FOLDER          # int8 weights and activations

A worker prints `{"ready": …}` when it can answer. Then, for each line in, one line out:
`{"do": "generate", "prompts": [[ids]], "new": n, "batch": bool}` → `{"seconds": s, "tokens": [[ids]], "pids": [...]}`
with greedy tokens, end-of-text ignored. `{"do": "profile", …}` is the same with seconds by part where a system has
them. Only the standard library is imported before the worker starts, so that any venv can run this file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

THREADS = 2
Tokens = list[list[int]]


class Llmopt:
    """This project: `llmopt.load` with the options given."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import llmopt
        import torch

        torch.set_num_threads(THREADS)
        self.llm = llmopt.load(model, num_threads=THREADS, **options)
        self.about = {"notes": [n["message"] for n in self.llm.notes], "torch": torch.__version__}

    def generate(self, prompts: Tokens, new: int, batch: bool) -> Tokens:
        found: Any = self.llm.generate(prompts, max_new_tokens=new, ignore_eos=True, temperature=0.0)
        return [one.token_ids for one in found]

    def profile(self, prompts: Tokens, new: int, batch: bool) -> dict[str, float]:
        """Seconds by part of the native decoder's steps, and `outside`: the rest of the wall time."""
        decoder = self.llm._backend.engine.runner.decoder  # type: ignore[attr-defined]
        decoder.profile(True)
        began = time.perf_counter()
        self.generate(prompts, new, batch)
        wall = time.perf_counter() - began
        parts = decoder.profile(False)
        return {**parts, "outside": wall - sum(parts.values()), "wall": wall}


class Transformers:
    """`generate` of transformers, left padding for a batch."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        import transformers

        self.torch = torch
        torch.set_num_threads(THREADS)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.about = {"transformers": transformers.__version__, "torch": torch.__version__}

    def generate(self, prompts: Tokens, new: int, batch: bool) -> Tokens:
        torch, longest = self.torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        return out[:, longest:].tolist()


class Vllm:
    """vLLM's offline engine, in this process."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import vllm

        self.llm = vllm.LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=32, **options)
        self.params = vllm.SamplingParams
        self.about = {"vllm": vllm.__version__}

    def generate(self, prompts: Tokens, new: int, batch: bool) -> Tokens:
        params = self.params(temperature=0.0, max_tokens=new, ignore_eos=True)
        found = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


class OrtGenai:
    """onnxruntime-genai; a batch is padded on the left, and a shared prefix is computed for every row."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import numpy
        import onnxruntime_genai as og

        self.og, self.np = og, numpy
        config = og.Config(model)
        self.model = og.Model(config)
        self.pad = json.loads(Path(model, "genai_config.json").read_text())["model"]["pad_token_id"]
        self.about = {"onnxruntime-genai": og.__version__}

    def generate(self, prompts: Tokens, new: int, batch: bool) -> Tokens:
        longest = max(map(len, prompts))
        params = self.og.GeneratorParams(self.model)
        total = longest + new
        params.set_search_options(max_length=total, min_length=total, batch_size=len(prompts), do_sample=False)
        generator = self.og.Generator(self.model, params)
        rows = [[self.pad] * (longest - len(p)) + p for p in prompts]
        generator.append_tokens(self.np.array(rows, dtype=self.np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [list(map(int, generator.get_sequence(i)))[longest:] for i in range(len(prompts))]


class OpenVino:
    """openvino-genai's continuous batching pipeline."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai as ov

        self.np, self.ov, self.tensor = numpy, ov, openvino.Tensor
        scheduler = ov.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = 1, 32
        scheduler.enable_prefix_caching = True
        found = {"INFERENCE_NUM_THREADS": THREADS}
        self.pipe = ov.ContinuousBatchingPipeline(model, scheduler, "CPU", found)
        self.about = {"openvino-genai": ov.__version__}

    def generate(self, prompts: Tokens, new: int, batch: bool) -> Tokens:
        config = self.ov.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        rows = [self.tensor(self.np.array([p], dtype=self.np.int64)) for p in prompts]
        found = self.pipe.generate(rows, [config] * len(rows))
        return [list(map(int, one.m_generation_ids[0])) for one in found]


class LlamaCpp:
    """llama-server: one of a single slot for single streams; for a batch another of 32, started when first needed."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.model, self.server = model, options["server"]
        self.processes: dict[bool, subprocess.Popen[bytes]] = {}
        self._start(False)
        found = subprocess.run([self.server, "--version"], capture_output=True, text=True)
        self.about = {"llama.cpp": (found.stderr or found.stdout).strip().splitlines()[0]}

    def _start(self, batch: bool) -> None:
        slots, context = (32, 32 * 1024) if batch else (1, 2048)
        command = f"{self.server} -m {self.model} -t 2 -tb 2 -np {slots} -c {context} -cb --port {8461 + batch}"
        self.processes[batch] = subprocess.Popen(command.split(), stdout=sys.stderr, stderr=sys.stderr)
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{8461 + batch}/health", timeout=5):
                    return
            except OSError:
                if self.processes[batch].poll() is not None:
                    raise RuntimeError("llama-server ended at start") from None
                time.sleep(0.02)
        raise RuntimeError("llama-server did not become healthy")

    def prepare(self, batch: bool) -> None:
        if batch not in self.processes:
            self._start(batch)

    def generate(self, prompts: Tokens, new: int, batch: bool) -> Tokens:
        def ask(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, "return_tokens": True}
            request = urllib.request.Request(
                f"http://127.0.0.1:{8461 + batch}/completion",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=600) as reply:
                return json.load(reply)["tokens"]

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, prompts))

    def pids(self, batch: bool) -> list[int]:
        return [self.processes[batch].pid]

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
            process.wait()


KINDS: dict[str, Any] = {
    "llmopt": Llmopt,
    "transformers": Transformers,
    "vllm": Vllm,
    "ortgenai": OrtGenai,
    "openvino": OpenVino,
    "llamacpp": LlamaCpp,
}


def serve(kind: str, model: str, options: dict[str, Any]) -> None:
    """Load, say so, answer until the input ends. What libraries print goes to standard error."""
    here = Path(__file__).resolve().parent  # a library that asks for `kernels` must not find the file beside this one
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    system = KINDS[kind](model, options)
    print(json.dumps({"ready": kind, "about": system.about}), file=out)
    for line in sys.stdin:
        message = json.loads(line)
        arguments = message["prompts"], message["new"], message["batch"]
        try:
            if hasattr(system, "prepare"):
                system.prepare(message["batch"])
            if message["do"] == "profile":
                print(json.dumps({"profile": system.profile(*arguments)}), file=out)
                continue
            began = time.perf_counter()
            tokens = system.generate(*arguments)
            seconds = time.perf_counter() - began
            pids = system.pids(message["batch"]) if hasattr(system, "pids") else None
            print(json.dumps({"seconds": seconds, "tokens": tokens, "pids": pids}), file=out)
        except Exception as error:  # the driver records it beside the figure that is missing
            print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:300]}"}), file=out)
    if hasattr(system, "close"):
        system.close()


def make_gguf(source: str, target: str) -> None:
    """Rewrite a GGUF with every matrix as Q4_0, the (tied) head too, so that llama.cpp decodes fastest."""
    import gguf
    from gguf.quants import dequantize, quantize

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if not field.name.startswith(skipped):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 2:
            q4 = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(tensor.name, quantize(values, q4), raw_dtype=q4)
        else:
            writer.add_tensor(tensor.name, values.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_w8a8(source: str, target: str) -> None:
    """A compressed-tensors folder: int8 weights with one scale a channel, activations int8 a token at run time."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in load_file(Path(source, "model.safetensors")).items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
            tensors[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[name.replace(".weight", ".weight_scale")] = scale.to(torch.bfloat16)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in Path(source).iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    both = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**both, "strategy": "channel", "dynamic": False},
        "input_activations": {**both, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    if sys.argv[1] == "make-gguf":
        make_gguf(*sys.argv[2:4])
    elif sys.argv[1] == "make-w8a8":
        make_w8a8(*sys.argv[2:4])
    else:
        given = json.loads(sys.argv[2])
        serve(sys.argv[1], given["model"], given.get("options", {}))
