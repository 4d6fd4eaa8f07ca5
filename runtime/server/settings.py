"""What an operator decides about a server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from ...optimizer.errors import UsageError

LOCAL_NAMES = ("localhost",)


@dataclass(frozen=True)
class ServerSettings:
    """`check` raises UsageError for settings that are unsafe or mean nothing."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Any of these opens the API; none: open to whoever reaches the port."""
    admin_keys: tuple[str, ...] = ()
    """Keys of `/admin/*`; none: there is no such path."""
    insecure: bool = False
    """Binding beyond loopback without an API key is what the operator wants."""
    served_names: tuple[str, ...] = ()
    """Names of the model in the API, the first one is answered with; none: the folder's name."""
    max_model_len: int | None = None
    """Most tokens of prompt and output; None: what model and KV pool allow."""
    max_queue: int = 256
    """Most requests that wait for a place in the engine."""
    max_body_bytes: int = 4 * 2**20
    max_sequences: int = 128
    """Most sequences (prompts times `n`) of one request."""
    request_seconds: float | None = None
    """Deadline of requests that bring none, from their arrival."""
    drain_seconds: float = 30.0
    """How long running requests may go on after SIGTERM."""
    stall_seconds: float = 60.0
    """Without a finished step for so long, though there is work, the server is unhealthy."""
    send_seconds: float = 60.0
    """A reader that takes nothing for so long is cut off."""
    head_seconds: float = 30.0
    """A connection that has not sent a request's whole head after so long is closed."""
    body_seconds: float = 60.0
    """A request whose body is not whole after so long gets 408."""
    max_unread: int = 8192
    """Outputs that may wait for a reader; more end the request."""
    log_format: Literal["json", "text"] = "text"
    log_text: bool = False
    """Put prompts and answers into the log."""
    page: bool = True
    tracing: bool = False
    """OpenTelemetry spans of HTTP requests, exported as the OTEL_* variables say."""

    def check(self) -> ServerSettings:
        if not is_loopback(self.host) and not self.api_keys and not self.insecure:
            raise UsageError(
                f"{self.host} is reachable from other machines and there is no API key",
                "serve",
                "Give --api-key-file, or --insecure if everyone may use it.",
            )
        for keys in (self.api_keys, self.admin_keys):
            wrong = [key for key in keys if not key or not key.isascii() or any(c.isspace() for c in key)]
            if wrong:
                raise UsageError("an API key is empty or has characters that no HTTP header takes", "serve")
        least = {"max_queue": 0, "max_body_bytes": 1024, "max_sequences": 1, "drain_seconds": 0, "max_unread": 16}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name}={getattr(self, name)} is below {low}", "serve")
        seconds = [f"{name}_seconds" for name in ("request", "stall", "send", "head", "body")]
        for name in (*seconds, "max_model_len"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise UsageError(f"{name}={value} is not above 0", "serve")
        return self


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
