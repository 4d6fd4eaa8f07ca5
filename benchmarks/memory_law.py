"""Memory law: how the peak memory of `llmopt optimize` grows with the size of the model.

Random llamas of about 1, 2 and 4 billion parameters are written to disk in bfloat16 shards, and each is optimized twice
in a process of its own: round-to-nearest over the whole model, and GPTQ over its first two blocks. Figures are the peak
resident memory of that process and of the process that proves the artifact, by the kernel's account (VmHWM). The sizes
`moe-…` are mixtures of 32 experts, whose other blocks are rounded to nearest in the second run.

    python benchmarks/memory_law.py --work /some/disk     # needs about 25 GB there for a while
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
BLOCKS = "re:model\\.layers\\.(?:[2-9]|\\d\\d+)\\..*"
"""Every layer but those of the first two blocks."""


@dataclass(frozen=True)
class Shape:
    """A llama: hidden and MLP width, blocks, query heads and key/value heads.

    With experts it is a qwen3_moe: each has the MLP width, and 8 see a token.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0


SHAPES = {
    "0.2B": Shape(1024, 2816, 10, 16, 4),
    "1B": Shape(2048, 5632, 20, 32, 4),
    "2B": Shape(2560, 6912, 26, 20, 4),
    "4B": Shape(3072, 8192, 38, 24, 8),
    "moe-1B": Shape(1024, 768, 10, 16, 4, 32),
    "moe-2B": Shape(1536, 768, 16, 24, 4, 32),
    "moe-4B": Shape(2048, 768, 24, 32, 4, 32),
}
RECIPES: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn", "bits": 4, "group_size": 64, "scale_search": 0},
    "gptq": {"method": "gptq", "bits": 4, "group_size": 64, "scale_search": 0, "ignore": [BLOCKS]},
}


def write_model(folder: Path, shape: Shape, shard: int, vocabulary: int = 32000) -> int:
    """Write a random model (standard deviation 0.02) in shards of at most `shard` bytes, one tensor at a time.

    Returns the bytes of its weights.
    """
    import torch
    from llmopt.exporters.shards import plan_shards
    from llmopt.runtime.experts import split_experts
    from llmopt.runtime.packed_load import build_empty
    from llmopt.runtime.tensor_files import Spec, write_tensors
    from transformers import LlamaConfig, Qwen3MoeConfig

    more: dict[str, Any] = {}
    if shape.experts:
        more = {"num_experts": shape.experts, "num_experts_per_tok": 8, "moe_intermediate_size": shape.intermediate,
                "head_dim": shape.hidden // shape.heads}  # fmt: skip
    config: Any = (Qwen3MoeConfig if more else LlamaConfig)(
        **more,
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    empty = build_empty(config, torch.bfloat16)
    split_experts(empty)  # as checkpoints have them
    state = empty.state_dict()
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(2**24, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)

    def tensor(name: str) -> torch.Tensor:
        meta = state[name]
        if meta.ndim == 1:
            return torch.ones(meta.shape, dtype=torch.bfloat16)
        repeats = -(-meta.numel() // pool.numel())
        return pool.repeat(repeats)[: meta.numel()].view(meta.shape)

    folder.mkdir(parents=True)
    specs = {name: Spec.of(meta) for name, meta in state.items()}
    shards = plan_shards({name: spec.nbytes for name, spec in specs.items()}, shard)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, {name: specs[name] for name in names}, tensor)
        weight_map.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.architectures = [type(empty).__name__]
    config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return sum(spec.nbytes for spec in specs.values())


def _tokenizer() -> Any:
    """A tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<eos>": len(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def optimize(model: Path, work: Path, quantize: dict[str, Any], max_memory: str) -> dict[str, Any]:
    """Run `llmopt optimize` and return peaks in bytes, seconds, and the size of the artifact; leaves nothing behind."""
    recipe = {
        "max_memory": max_memory,
        "calibration": {"text": "default", "num_samples": 8, "sequence_length": 256},
        "passes": [{"quantize": quantize}, "flash_attention"],
        "evaluate": {"windows": 1, "window_length": 64, "speed": False, "new_tokens": 1, "prompts": ["The"]},
    }
    file, out = work / "recipe.yaml", work / "out"
    file.write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "llmopt.optimizer.cli", "optimize", "-r", str(file), "-m", str(model)]
    command += ["-o", str(out), "--cache-dir", str(work / "cache"), "--no-cache", "--log", "json"]
    start, peak = time.perf_counter(), 0
    with (work / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        while process.poll() is None:
            peak = max(peak, _peak(process.pid))
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit((work / "log").read_text()[-3000:])
    seconds = time.perf_counter() - start
    manifest = json.loads((out / "llmopt.json").read_text())
    shutil.rmtree(out)
    return {
        "peak": peak,
        "proof_peak": manifest["measured"]["after"]["peak_rss_bytes"],
        "backend": manifest["certificate"]["backend"],
        "artifact": manifest["measured"]["after"]["disk_bytes"],
        "modules": manifest["passes"][0]["details"]["modules"],
        "seconds": round(seconds, 1),
    }


def _peak(pid: int) -> int:
    """VmHWM of a process, in bytes; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown, with the growth of the peak over that of the weights."""
    lines = [
        "| model | weights MiB | method | modules | artifact MiB | peak MiB | proof peak MiB | s | growth |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first: dict[str, dict[str, Any]] = {}
    for row in results:
        base = first.setdefault(row["method"], row)
        grown = row["weights"] - base["weights"]
        share = f"{(row['peak'] - base['peak']) / grown:.1%}" if grown else ""
        sizes = [f"{row[key] / MIB:,.0f}" for key in ("artifact", "peak", "proof_peak")]
        cells = [row["model"], f"{row['weights'] / MIB:,.0f}", row["method"], str(row["modules"]), *sizes]
        lines.append(f"| {' | '.join([*cells, str(row['seconds']), share])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder on a disk with room")
    parser.add_argument("--sizes", nargs="+", default=["1B", "2B", "4B"], choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--max-memory", default="3GB", help="the recipe's max_memory")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="memory-law-", dir=options.work) as scratch:
            model = Path(scratch) / size
            weights = write_model(model, SHAPES[size], 10**9)
            for method in options.methods:
                recipe = dict(RECIPES[method])
                if SHAPES[size].experts and recipe.pop("ignore", None):  # transformers wants all experts or none
                    recipe |= {"overrides": {BLOCKS: {"method": "rtn"}}, "few_tokens": "rtn"}
                figures = optimize(model, Path(scratch), recipe, options.max_memory)
                results.append({"model": size, "weights": weights, "method": method, **figures})
                print(json.dumps(results[-1]), flush=True)
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
