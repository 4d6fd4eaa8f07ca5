"""What a client saw of one request: when it was sent, when pieces came, how it ended. Times are seconds on the clock of
the run, which starts at 0 when the load does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """One request. `end` and `error` are None while it runs; afterwards exactly one of them is set."""

    index: int
    planned: float = 0.0
    """When the arrival process wanted it sent."""
    sent: float = 0.0
    """When it was sent; later than planned where the client's limit of concurrent requests held it back."""
    chunk_times: list[float] = field(default_factory=list)
    """When each chunk of content came."""
    chunk_tokens: list[int | None] = field(default_factory=list)
    """Tokens of each chunk: more than one with speculation; None where the stream does not say."""
    end: float | None = None
    """When the last piece of a complete answer came."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = "chunks"
    """Who counted the output: `engine`, `usage` (the server), `tokenizer` or `chunks` (nobody did: one a chunk)."""
    finish_reason: str | None = None
    error: str | None = None
    token_ids: list[int] | None = None
    text: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None and self.end is not None and bool(self.chunk_times)

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first chunk of content."""
        return self.chunk_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """End-to-end latency: from sending to the last piece."""
        assert self.end is not None
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:])]

    def fail(self, why: object) -> None:
        """End it as failed; a failed request enters no average."""
        self.error, self.end = " ".join(str(why).split()) or "failed without a word", None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times rounded to a microsecond; token ids and text only where they were kept."""
        plain = {
            "index": self.index,
            "planned": round(self.planned, 6),
            "sent": round(self.sent, 6),
            "chunk_times": [round(t, 6) for t in self.chunk_times],
            "chunk_tokens": list(self.chunk_tokens),
            "end": None if self.end is None else round(self.end, 6),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "counted_by": self.counted_by,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }
        kept = {"token_ids": self.token_ids, "text": self.text}
        return {**plain, **{name: value for name, value in kept.items() if value is not None}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RequestRecord:
        return cls(**data)
