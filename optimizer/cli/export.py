"""`llmopt export`: a finished artifact in another format, or to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import UsageError


@click.command()
@click.argument("artifact", metavar="ARTIFACT")
@click.option("--format", "-f", "format_", metavar="NAME", help="Exporter, see `llmopt exporters`; onnx, gguf …")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Option of the exporter.")
@click.option("--out", "-o", type=click.Path(path_type=Path), help="Folder of the exported artifact.")
@click.option("--force", is_flag=True, help="Replace an artifact that is at --out.")
@click.option("--push-to-hub", "repository", metavar="ORG/NAME", help="Upload the result, with a model card.")
@click.option("--private", is_flag=True, help="Make the hub's repository private.")
@click.option("--dry-run", is_flag=True, help="Print the model card; write and upload nothing.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model's folder carries.")
@click.option("--log", type=click.Choice(["rich", "plain", "json", "none"]), default="rich", show_default=True)
def export(
    artifact: str,
    format_: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    force: bool,
    repository: str | None,
    private: bool,
    dry_run: bool,
    trust_remote_code: bool,
    log: str,
) -> None:
    """Write an artifact (or a plain model) in another format, proved against it, without repeating its passes.

    Without --format, --push-to-hub uploads the artifact as it is.
    """
    from ..artifact import Artifact
    from ..export import export_artifact
    from ..hub import check_repository, push_to_hub
    from .progress import listener

    exporter = _exporter(format_, settings) if format_ else None
    if repository is not None:
        check_repository(repository)
    elif exporter is None and not dry_run:
        raise UsageError("there is nothing to do", "export", "Name a --format, or a repository with --push-to-hub")
    if dry_run:
        click.echo(_planned_card(artifact, exporter, repository))
        return
    if exporter is None:
        made = Artifact.open(artifact)
    else:
        if out is None:
            raise UsageError("no folder is named", "export", "Pass --out DIR")
        with listener(log) as listen:
            made = export_artifact(
                artifact, exporter, out, force=force, trust_remote_code=trust_remote_code, listener=listen
            )
        _show(made.manifest.exporter)
        click.echo(f"Artifact: {made.path}")
    if repository is not None:
        click.echo(f"Uploaded: {push_to_hub(made.path, made.manifest, repository, private)}")


def _exporter(name: str, settings: tuple[str, ...]) -> Any:
    """The exporter with its options. Raises UsageError for an unknown name, key or a bad value."""
    import yaml

    from ..registry import find

    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UsageError(f"{setting!r} is not KEY=VALUE", "--set")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"the value of {setting!r} is not valid YAML", "--set") from None
    return find("exporters", name, "--format")(**options)


def _planned_card(artifact: str, exporter: Any, repository: str | None) -> str:
    """The card of what would be uploaded, from the artifact's manifest."""
    from ..manifest import read_manifest
    from ..model_card import model_card

    manifest = read_manifest(Path(artifact))
    if exporter is not None:
        record = {"name": exporter.name, **exporter.config.model_dump(mode="json")}
        manifest = manifest.model_copy(update={"exporter": record})
    return model_card(manifest, repository.rpartition("/")[2] if repository else Path(artifact).name)


def _show(exporter: dict[str, Any]) -> None:
    """Print what the proof measured."""
    for key, value in (exporter.get("parity") or {}).items():
        shown = f"{value:.3g}" if isinstance(value, float) else value
        click.echo(f"{key.replace('_', ' ')}: {shown}")
