"""Versions of what a run depends on: for manifests, cache keys and `llmopt doctor`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("torch", "transformers", "compressed-tensors", "safetensors", "numpy")


def library_version(name: str) -> str | None:
    """Version of an installed distribution, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, str]:
    """Library versions and the kind of machine; nothing that names the machine or its user."""
    import os

    found = {name: library_version(name) or "absent" for name in LIBRARIES}
    return {
        "python": platform.python_version(),
        **found,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_threads": str(os.cpu_count()),
        "device": _device(),
    }


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
