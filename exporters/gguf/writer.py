"""Writes the file: metadata first, then one tensor after another, so that one is in memory at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...runtime.artifact import read_manifest
from .metadata import add_architecture, add_general, rope_tensors
from .tokens import add_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...optimizer.base import Context
    from ...optimizer.model import LoadedModel
    from .families import Family
    from .options import GGUFOptions
    from .tensors import Entry

ELEMENTS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def write_file(
    path: Path, model: LoadedModel, family: Family, entries: list[Entry], options: GGUFOptions, context: Context
) -> dict[str, Any]:
    """Write `path`; returns what `add_tokenizer` says. Raises UsageError for what llama.cpp does not have."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape

    config = cast("PreTrainedModel", model.module).config
    writer = GGUFWriter(None, family.arch)
    add_general(writer, general_record(model, entries, options))
    add_architecture(writer, family, config, context)
    generation, pre = model.generation_config, options.pre_tokenizer
    tokenizer = add_tokenizer(writer, model.tokenizer, generation, config.vocab_size, pre)
    extra = rope_tensors(config)
    for name, values in extra.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for entry in entries:
        kind = GGMLQuantizationType[entry.kind]
        element = np.dtype(ELEMENTS.get(entry.kind, np.uint8))
        shape = entry.shape if entry.kind in ELEMENTS else quant_shape_to_byte_shape(entry.shape, kind)
        size = int(np.prod(shape)) * element.itemsize
        writer.add_tensor_info(entry.name, shape, element, size, raw_dtype=kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in extra.values():
            writer.write_tensor_data(values)
        for number, entry in enumerate(entries, start=1):
            writer.write_tensor_data(np.ascontiguousarray(entry.read()))
            context.progress(number, len(entries), entry.name)
    finally:
        writer.close()
    return tokenizer


def general_record(model: LoadedModel, entries: list[Entry], options: GGUFOptions) -> dict[str, Any]:
    """What `add_general` writes, from the artifact's manifest where there is one."""
    from gguf import LlamaFileType
    from gguf.utility import size_label

    manifest = read_manifest(model.source.folder) or {}
    source = manifest.get("source") or model.source.as_dict()
    identity = str(source["id"])
    local = Path(identity).exists() or identity.startswith(("/", "."))
    name = options.name or Path(identity).name.removesuffix(".gguf")
    count = sum(int(np.prod(entry.shape)) for entry in entries)
    recipe = (manifest.get("recipe") or {}).get("name")
    sizes: Counter[str] = Counter()
    for entry in entries:
        if len(entry.shape) > 1:
            sizes[entry.kind] += int(np.prod(entry.shape))
    main = next((kind for kind, _ in sizes.most_common() if kind not in ELEMENTS), sizes.most_common(1)[0][0])
    prefix = "ALL" if main == "F32" else "MOSTLY"
    return {
        "name": name,
        "description": f"Written by llmopt, recipe {recipe}" if recipe else "Written by llmopt",
        "size_label": size_label(count, count, 0, 0),
        "license": source.get("license"),
        "base_model": None if local else identity,
        "file_type": int(LlamaFileType[f"{prefix}_{main}"]),
    }
