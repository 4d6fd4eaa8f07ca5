"""Single layers exchanged with GPTQModel: does each read the other's tensors as the same weights, bit for bit?

    python benchmarks/cross_loading_layers.py --peers FOLDER

peers: a folder with a venv `gptqmodel`. For every number of bits, symmetric or not, plain groups, one group a channel
and groups in activation order, a layer of random codes is written by our exporter and dequantized by GPTQModel's, and
one packed by GPTQModel, in both checkpoint formats, is dequantized by ours. All weights are compared in float32, where
they are exact. `cross_loading.py` does the same with whole models, which takes much longer. Prints a table; exits 1
where any weight differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS, COLUMNS = 64, 128
CASES: list[dict[str, Any]] = [
    {"bits": bits, "sym": sym, "group_size": size, "order": order}
    for bits, sym, (size, order) in itertools.product(
        (2, 3, 4, 8), (True, False), ((32, False), (-1, False), (32, True))
    )
]


def worker(folder: Path) -> None:
    """GPTQModel's side: reads `ours.safetensors`, writes what it makes of it, and layers that it packs itself."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    from gptqmodel.nn_modules.qlinear import PackableQuantLinear
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
    from safetensors.torch import load_file, save_file

    given, out = load_file(folder / "ours.safetensors"), {}

    def new(case: dict[str, Any]) -> Any:
        return TorchLinear(
            bits=case["bits"], group_size=case["group_size"], sym=case["sym"], desc_act=case["order"],
            in_features=COLUMNS, out_features=ROWS, bias=False, register_buffers=True,
        )  # fmt: skip

    for i, case in enumerate(CASES):
        layer = new(case)
        for leaf in ("qweight", "qzeros", "scales", "g_idx"):
            layer.register_buffer(leaf, given[f"{i}.{leaf}"].clone())
        if case["sym"]:
            convert_gptq_v1_to_v2_format_module(layer, case["bits"], torch.int32)
        layer.scales = layer.scales.float()
        out[f"{i}.weight"] = PackableQuantLinear.dequantize_weight(layer).t().contiguous()

        layer, linear = new(case), torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data = given[f"{i}.weight"]
        scales, zeros = given[f"{i}.scales"].float().t().contiguous(), given[f"{i}.zeros"].int()
        layer.pack_original(linear, scales, zeros, given[f"{i}.g_idx"].clone())
        for format_ in ("gptq_v2", "gptq"):
            if format_ == "gptq":
                convert_gptq_v2_to_v1_format_module(layer, _Config(case["bits"]))
            for leaf in ("qweight", "qzeros", "scales", "g_idx"):
                out[f"{i}.{format_}.{leaf}"] = getattr(layer, leaf).contiguous().clone()
    save_file(out, folder / "theirs.safetensors")


class _Config:
    """What GPTQModel's conversion asks of a config."""

    def __init__(self, bits: int) -> None:
        import torch

        self.bits, self.pack_dtype = bits, torch.int32


def write(folder: Path) -> None:
    """Our side's layers: random codes, scales that bfloat16 holds, zero points with 0 among them."""
    import torch
    from llmopt.exporters.gptq import gptq_tensors
    from llmopt.runtime.kernels.packed import PackedLinear, QuantScheme
    from safetensors.torch import save_file

    out: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for i, case in enumerate(CASES):
        scheme = QuantScheme(case["bits"], case["group_size"], case["sym"], case["order"])
        groups, most = scheme.num_groups(COLUMNS), 2 ** case["bits"]
        codes = torch.randint(0, most, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
        scales = ((torch.rand(ROWS, groups, generator=generator) + 0.5) * 0.02).bfloat16()
        zeros = None
        if not case["sym"]:
            zeros = torch.randint(0, most, (ROWS, groups), generator=generator, dtype=torch.uint8)
        g_idx = torch.randperm(COLUMNS, generator=generator).int() // (COLUMNS // groups) if case["order"] else None
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        layer = PackedLinear.from_linear(linear, codes, scales, zeros, scheme, g_idx)
        stored = {f"layer.{name}": tensor for name, tensor in layer.state_dict().items()}
        for leaf, (_, make) in gptq_tensors("layer", layer, case["sym"], stored.__getitem__).items():
            out[f"{i}.{leaf}"] = make()
        layer.weight_scale.data = scales.float()  # so that the product is exact
        out[f"{i}.weight"] = layer.weight.clone()
        out[f"{i}.zeros"] = torch.full((ROWS, groups), most // 2, dtype=torch.uint8) if zeros is None else zeros
    save_file(out, folder / "ours.safetensors")


def compare(folder: Path) -> list[dict[str, Any]]:
    """A line for each case: whether weights are equal, read there and read here."""
    import torch
    from llmopt.runtime.kernels.gptq_linear import GPTQLinear, GPTQScheme
    from safetensors.torch import load_file

    ours, theirs = load_file(folder / "ours.safetensors"), load_file(folder / "theirs.safetensors")
    lines = []
    for i, case in enumerate(CASES):
        weight = ours[f"{i}.weight"]
        line = {**case, "ours there": torch.equal(theirs[f"{i}.weight"], weight)}
        for format_ in ("gptq", "gptq_v2"):
            scheme = GPTQScheme(case["bits"], case["group_size"], case["sym"], True, format_ == "gptq")
            layer = GPTQLinear.empty(COLUMNS, ROWS, scheme, dtype=torch.float32)
            leaves = ("qweight", "qzeros", "scales", "g_idx")
            layer.load_state_dict({leaf: theirs[f"{i}.{format_}.{leaf}"] for leaf in leaves}, assign=True)
            line[f"theirs here, {format_}"] = torch.equal(layer.weight, weight)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the venv `gptqmodel`")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        here = Path(__file__).resolve().parent
        sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
        worker(args.worker)
        return
    if args.peers is None:
        parser.error("--peers is needed")
    with tempfile.TemporaryDirectory(prefix="cross-loading-") as scratch:
        write(Path(scratch))
        python = str(args.peers.resolve() / "gptqmodel" / "bin" / "python")
        subprocess.run([python, __file__, "--worker", scratch], check=True, capture_output=True)
        lines = compare(Path(scratch))
    print("| " + " | ".join(lines[0]) + " |\n" + "|---" * len(lines[0]) + "|")
    for line in lines:
        print("| " + " | ".join(str(value) for value in line.values()) + " |")
    print(json.dumps({"different": sum(value is False for line in lines for k, value in line.items() if " " in k)}))
    sys.exit(any(value is False for line in lines for key, value in line.items() if " " in key))


if __name__ == "__main__":
    main()
