"""Memory of a model and of the process."""

from __future__ import annotations

import sys

from ..runtime.memory import weight_bytes

__all__ = ["peak_rss", "weight_bytes"]


def peak_rss() -> int:
    """Most bytes of physical memory that this process has had so far (on Windows: what it has now)."""
    try:
        import resource
    except ImportError:
        import psutil

        return psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
