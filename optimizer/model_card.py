"""The model card of an artifact, written from its manifest: what it is, how it was made, what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .manifest import Manifest
from .sources import HUB_ID

CARD = "README.md"
LIBRARIES = {"huggingface": "transformers", "onnx": "onnx", "gguf": "gguf"}
"""Exporter → the hub's name of the library that opens its folder."""
FIGURES = {
    "perplexity": ("perplexity", "{:,.3f}"),
    "disk_bytes": ("size of the weight files, MB", "{:,.1f}"),
    "decode_tokens_per_second": ("decode, tokens/s (batch 1, the machine of the manifest)", "{:,.1f}"),
}
DIVERGENCE = {
    "mean_kl": ("mean KL from the source, nats a token", "{:.4f}"),
    "top1_agreement": ("top-1 agreement with the source", "{:.2%}"),
    "perplexity_increase": ("rise of perplexity", "{:+.2%}"),
    "compression": ("times smaller than the source", "{:.2f}"),
}


def model_card(manifest: Manifest, name: str) -> str:
    """Markdown with the hub's YAML header. `name` is the title; the license is the source's, where it names one."""
    lines = [*_header(manifest), "", f"# {name}", ""]
    made = f"by [recipe](llmopt.json) `{manifest.recipe['name']}`" if manifest.passes else "without further passes"
    lines += [f"`{base_name(manifest)}` {made}, written by llmopt {manifest.llmopt_version} ({_format(manifest)}).", ""]
    if manifest.passes:
        lines += ["## How it was made", ""]
        lines += [f"- `{record.name}`: {record.summary}" for record in manifest.passes]
        lines += [""]
    lines += _table(manifest)
    parity = manifest.exporter.get("parity")
    if parity:
        lines += ["## Parity of the export", "", "| figure | value |", "|---|---|"]
        lines += [f"| {key.replace('_', ' ')} | {_shown(value)} |" for key, value in parity.items()] + [""]
    lines += _notes(manifest)
    lines += ["## Use", "", "```python", "import llmopt", "", f'llm = llmopt.load("{name}")']
    lines += ['print(llm.generate("Hello").text)', "```", ""]
    return "\n".join(lines)


def base_name(manifest: Manifest) -> str:
    """What the source is called in public: a local folder by its last name alone."""
    return manifest.source.id if HUB_ID.match(manifest.source.id) else Path(manifest.source.id).name


def _header(manifest: Manifest) -> list[str]:
    source = manifest.source
    lines = ["---"]
    if source.license:
        lines.append(f"license: {source.license}")
    if HUB_ID.match(source.id) and source.kind != "folder":
        lines += [f"base_model: {source.id}"]
        if manifest.passes and any(record.name == "quantize" for record in manifest.passes):
            lines.append("base_model_relation: quantized")
    lines += [f"library_name: {LIBRARIES.get(manifest.exporter.get('name', ''), 'llmopt')}"]
    return [*lines, "pipeline_tag: text-generation", "tags:", "- llmopt", "---"]


def _format(manifest: Manifest) -> str:
    exporter = manifest.exporter
    parts = [exporter.get("name", ""), exporter.get("flavor", ""), exporter.get("format", "")]
    return ", ".join(part for part in parts if part)


def _table(manifest: Manifest) -> list[str]:
    """Rows of source and artifact, then of what lies between them; empty where nothing was measured."""
    before, after = manifest.measured.get("before", {}), manifest.measured.get("after", {})
    rows = []
    for key, (title, form) in FIGURES.items():
        values = [figures.get(key) for figures in (before, after)]
        if any(value is not None for value in values):
            scale = 1e-6 if key == "disk_bytes" else 1.0
            rows.append(f"| {title} | {' | '.join('' if v is None else form.format(v * scale) for v in values)} |")
    for key, (title, form) in DIVERGENCE.items():
        value = manifest.measured.get("divergence", {}).get(key)
        if value is not None:
            rows.append(f"| {title} | | {form.format(value)} |")
    if not rows:
        return []
    tokens = before.get("evaluated_tokens")
    note = [f"Measured on {tokens:,} tokens of text that no pass was calibrated on.", ""] if tokens else []
    return ["## Quality", "", "| figure | source | artifact |", "|---|---|---|", *rows, "", *note]


def _notes(manifest: Manifest) -> list[str]:
    kept = [note for note in manifest.notes if note.kind == "fallback"]
    lines = ["## Fallbacks", "", *[f"- {note.stage}: {note.message}" for note in kept], ""]
    return lines if kept else []


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
