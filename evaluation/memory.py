"""Memory of a model and of the process."""

from __future__ import annotations

from ..runtime.memory import peak_memory as peak_rss
from ..runtime.memory import weight_bytes

__all__ = ["peak_rss", "weight_bytes"]
