"""What every kind of target gives back for one run of a workload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from .prompts import Request
from .records import RequestRecord


@dataclass(frozen=True)
class Load:
    """Requests, when each is due (seconds after the start), and how many may be under way at once (None: any)."""

    requests: list[Request]
    arrivals: list[float]
    max_concurrency: int | None = None

    def as_dict(self) -> dict[str, Any]:
        requests = [request.as_dict() for request in self.requests]
        return {"requests": requests, "arrivals": self.arrivals, "max_concurrency": self.max_concurrency}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Load:
        return cls([Request(**one) for one in data["requests"]], data["arrivals"], data["max_concurrency"])


@dataclass
class Result:
    """One run: the records in the order of the requests, and the seconds from the start to the last answer's end.

    speculation: see `metrics.acceptance`. memory: `rss_bytes` and `device_bytes`, peaks of what ran the model; None,
    and the reason under `…_note`, where the machine does not tell.
    """

    records: list[RequestRecord]
    duration: float
    speculation: dict[str, Any] | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        records = [record.as_dict() for record in self.records]
        return {**self.__dict__, "records": records}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        return cls(**{**data, "records": [RequestRecord.from_dict(one) for one in data["records"]]})


class Target(Protocol):
    """Something that answers requests: a process with an artifact, or a server."""

    name: str

    def run(self, load: Load) -> Result: ...

    def pids(self) -> list[int]:
        """Processes on this machine that work for it; their CPU time is not foreign."""
        ...

    def about(self) -> dict[str, Any]:
        """What it is and how it runs, for the report."""
        ...

    def close(self) -> None: ...
