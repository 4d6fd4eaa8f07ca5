"""What the fresh process of `gate.py` does: `python -m llmopt.exporters.gguf.check REQUEST.json FINDINGS.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ...optimizer.errors import LlmoptError, RunError
from .exporter import FILE

REQUIRED = (
    "general.architecture", "general.name", "general.file_type", "tokenizer.ggml.model", "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token",
)  # fmt: skip
"""Metadata that every file must have."""
HALF_STEP = {"F16": 2.0**-11, "BF16": 2.0**-8}
"""Largest relative rounding of a floating-point type. (BF16: twice that of nearest rounding, for either way.)"""


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Raises RunError where the file is not the model."""
    folder = Path(request["folder"])
    metadata = check_metadata(folder / FILE)
    module = read_model(folder)
    figures = check_tensors(module, Path(request["reference"]), request["rules"])
    figures["metadata_keys"] = metadata
    if request["server"] is None:
        return {**figures, "llama_cpp": "not done: there is no llama-server here"}
    from .llama_check import check_llama

    return {**figures, **check_llama(module, folder, Path(request["server"]), request["rules"])}


def check_metadata(file: Path) -> int:
    """The number of metadata keys. Raises RunError where one that must be there is not."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    missing = [key for key in REQUIRED if key not in fields]
    if missing:
        raise RunError(f"the metadata lack {', '.join(missing)}", str(file))
    return len(fields)


def read_model(folder: Path) -> Any:
    """The model as transformers reads it from the file, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ...runtime.open import quiet_transformers

    options: dict[str, Any] = {}
    try:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass  # releases before GgufConfig always dequantize
    with quiet_transformers():
        config = as_llama(AutoConfig.from_pretrained(folder))
        module = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=FILE, config=config, dtype=torch.float32, **options
        )
    return module.eval()


def as_llama(config: Any) -> Any:
    """Mistral's config as a llama's, which it is to llama.cpp and to transformers' reading of GGUF; others as they are.

    Their modules and parameters have the same names, and without a sliding window they compute the same.
    """
    if config.model_type != "mistral":
        return config
    from transformers import LlamaConfig

    values = config.to_dict()
    for key in ("model_type", "architectures", "sliding_window", "transformers_version"):
        values.pop(key, None)
    return LlamaConfig(**values)


def check_tensors(module: Any, reference: Path, rules: dict[str, Any]) -> dict[str, Any]:
    """Counts, and the largest difference. Raises RunError that names the first tensor that is not the model's."""
    from safetensors import safe_open

    found = module.state_dict()
    counts = {"exact": 0, "bounded": 0, "rounded": 0}
    worst = 0.0
    with safe_open(reference, "pt") as file:
        for name, rule in rules.items():
            if name not in found:
                raise RunError("transformers does not find this tensor in the file", name)
            wanted = file.get_tensor(name).float().numpy()
            read = found[name].float().numpy()
            if read.shape != wanted.shape:
                raise RunError(f"it has shape {read.shape} in the file and {wanted.shape} in the model", name)
            difference = np.abs(read - wanted)
            limit = allowed(wanted, rule)
            if not (difference <= limit).all():
                raise RunError(
                    f"its values in the file, as {rule['kind']}, are up to {difference.max():.3g} off",
                    name,
                )
            counts[rule["rule"]] += 1
            worst = max(worst, float(difference.max(initial=0.0)))
    return {**{f"tensors_{rule}": count for rule, count in counts.items()}, "tensor_max_difference": worst}


def allowed(wanted: Any, rule: dict[str, Any]) -> Any:
    """How far values in the file may be from the model's, in the shape of `wanted`."""
    kind = rule["kind"]
    if rule["rule"] == "exact":
        return np.zeros_like(wanted)
    if rule["rule"] == "bounded":
        return np.full_like(wanted, rule["bound"] * 1.001)
    if kind in HALF_STEP:
        return np.abs(wanted) * HALF_STEP[kind] + 2.0**-25
    blocks = wanted.reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    if kind == "Q8_0":  # half a step, and float16's rounding of the step, which 127 codes multiply
        limit = largest * (0.5 / 127 + 2.0**-11) + 2.0**-20
    elif kind == "Q4_0":  # its grid has 8 steps down and 7 up: the other end may be a whole step away
        limit = largest * (1.0 / 8 + 2.0**-10) + 2.0**-20
    else:
        steps = 31 if kind == "Q5_1" else 15
        spread = blocks.max(axis=1, keepdims=True) - blocks.min(axis=1, keepdims=True)
        limit = spread * (0.5 / steps + 2.0**-11) + largest * 2.0**-10 + 2.0**-20
    return np.broadcast_to(limit, blocks.shape).reshape(wanted.shape)


def main(arguments: list[str]) -> int:
    """On failure one line to standard error and exit code 1."""
    request, out = map(Path, arguments)
    try:
        findings = check(json.loads(request.read_text(encoding="utf-8")))
    except LlmoptError as error:
        print(error, file=sys.stderr)
        return 1
    out.write_text(json.dumps(findings), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
