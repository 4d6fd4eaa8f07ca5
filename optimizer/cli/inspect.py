"""`llmopt inspect` and `llmopt verify`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@click.option("--layers", is_flag=True, help="List what was done to every module.")
def inspect(artifact: Path, as_json: bool, layers: bool) -> None:
    """Say what an artifact is, how it was made and what it measured."""
    from ..manifest import read_manifest
    from .progress import duration
    from .tables import before_after, console

    manifest = read_manifest(artifact)
    if as_json:
        click.echo(json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False))
        return
    out = console()
    source = manifest.source
    revision = f" at {source.revision}" if source.revision else ""
    out.print(f"[bold]{artifact}[/]: {source.id}{revision}, by recipe {manifest.recipe['name']}", highlight=False)
    out.print(f"made {manifest.created} by llmopt {manifest.llmopt_version}, seed {manifest.seed}", highlight=False)
    if source.license:
        out.print(f"license of the source: {source.license}", highlight=False)
    for record in manifest.passes:
        cached = ", from the cache" if record.cached else ""
        out.print(f"  pass {record.name}: {record.summary} ({duration(record.seconds)}{cached})", highlight=False)
        for layer in record.layers if layers else []:
            facts = ", ".join(f"{key} {value}" for key, value in layer.items() if key != "name")
            out.print(f"    {layer.get('name')}: {facts}", highlight=False, markup=False)
    runtime = manifest.runtime
    out.print(f"  runtime: attention {runtime.attention.chosen or runtime.attention.backend}, ", end="")
    out.print(f"KV cache {runtime.kv_cache.kind} ({runtime.kv_cache.dtype}), draft {runtime.draft.kind}")
    before_after(manifest)


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that the artifact carries.")
@click.option("--log", type=click.Choice(["rich", "plain", "json", "none"]), default="rich", show_default=True)
def verify(artifact: Path, log: str, trust_remote_code: bool) -> None:
    """Check an artifact's hashes, reopen it in a fresh process and generate; exit 1 where it does not hold."""
    from ..verify import verify as run
    from .progress import listener

    with listener(log) as listen:
        result = run(artifact, listen, trust_remote_code)
    answers = "as recorded" if result["compared"] else "(not compared with the record: other libraries made it)"
    click.echo(f"{artifact} holds: {result['files']} files, {result['prompts']} prompts answered {answers}")
