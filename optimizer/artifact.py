"""Artifact: a finished folder and its manifest, as `llmopt.optimize` returns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .manifest import Manifest, read_manifest


@dataclass(frozen=True)
class Artifact:
    """A folder that `llmopt.load` and plain transformers open, with what is known of it."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path) -> Artifact:
        """Read a folder's manifest. Raises RunError where it is absent or not valid."""
        return cls(Path(path), read_manifest(Path(path)))

    @property
    def report(self) -> dict[str, Any]:
        """Figures of source (`before`) and artifact (`after`), their `divergence`, gates, passes and notes."""
        dumped = self.manifest.model_dump(mode="json")
        return {**self.manifest.measured, **{key: dumped[key] for key in ("gates", "passes", "notes")}}

    def load(self, **options: Any) -> Any:
        """The same as `llmopt.load(artifact.path, **options)`."""
        from ..runtime.llm import load

        return load(self.path, **options)
