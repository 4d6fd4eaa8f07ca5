"""Server-sent events from bytes as they come (WHATWG HTML, section 9.2), as far as OpenAI's API uses them."""

from __future__ import annotations


class EventStream:
    """Feed it what the network gave; it gives the `data` of every event that is complete. Comments are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """Raises ValueError for a line that is not UTF-8."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode())
            elif not line and self._data:
                found.append("\n".join(self._data))
                self._data = []
        return found

    def close(self) -> list[str]:
        """What is left of a stream that ends without an empty line."""
        return self.feed(b"\n\n")
