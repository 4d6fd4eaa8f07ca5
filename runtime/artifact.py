"""Reading an llmopt artifact: its manifest `llmopt.json` and the hashes of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..optimizer.errors import RunError
from ..optimizer.runtime_spec import RuntimeSpec
from .weight_files import confined, read_json

MANIFEST = "llmopt.json"
REPORT = "report.html"
"""A picture of the manifest, which may be drawn anew at any time: no hash covers it, and nothing reads it."""


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an artifact, None for a folder that is none. Raises RunError where it is malformed."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise RunError("the manifest is not a JSON object", where=str(path))
    version = manifest.get("schema_version")
    if version is not None and (version != 1 or isinstance(version, bool)):
        raise RunError(f"schema version {version!r} is not one that this llmopt reads (1)", str(path), "Update llmopt")
    return manifest


def runtime_spec(folder: Path, manifest: dict[str, Any] | None) -> RuntimeSpec:
    """The RuntimeSpec that the manifest holds; the default one where there is none. Raises RunError on a bad one."""
    if manifest is None or manifest.get("runtime") is None:
        return RuntimeSpec.model_validate({})
    try:
        return RuntimeSpec.model_validate(manifest["runtime"])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RunError(
            f"runtime.{key}: {first['msg']}",
            where=str(folder / MANIFEST),
            what_to_do="The artifact may come from a newer llmopt: upgrade, or make it again.",
        ) from None


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def verify_files(folder: Path, manifest: dict[str, Any]) -> int:
    """Hash every file that the manifest names; return how many there were.

    Raises RunError that names the first file that is missing, differs, lies outside the folder, or is a weight or
    code file that the manifest does not know.
    """
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise RunError("the manifest names no files, so nothing can be verified", where=str(folder / MANIFEST))
    for relative, expected in files.items():
        path = confined(folder, relative)
        if not path.is_file():
            raise RunError("the file is missing, the manifest names it", where=str(path))
        actual = sha256_file(path)
        if actual != expected:
            raise RunError(
                f"the file was changed or damaged: SHA-256 {actual[:12]}…, the manifest says {str(expected)[:12]}…",
                where=str(path),
                what_to_do="Fetch or make the artifact again.",
            )
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.suffix in {".safetensors", ".py", ".bin"} and relative not in files:
            raise RunError("the manifest does not know this file", where=str(path), what_to_do="Remove it.")
    return len(files)
