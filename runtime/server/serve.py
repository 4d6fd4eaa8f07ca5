"""Running the server: socket, event loop, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Literal

from ...optimizer.errors import MissingDependency, RunError, UsageError
from .logs import Log
from .model import ServedModel
from .settings import ServerSettings

CLOSE_SECONDS = 5


def check_libraries(tracing: bool = False) -> None:
    """Raise MissingDependency where the extra `serve` is not installed, or `opentelemetry` for tracing."""
    for library in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            __import__(library)
        except ImportError:
            raise MissingDependency(library.replace("_", "-"), "serve", "the server") from None
    if tracing:
        try:
            __import__("fastapi.telemetry")
            __import__("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError as error:
            raise MissingDependency(str(error.name), "opentelemetry", "--tracing (Python 3.11 or newer)") from None


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError where the address cannot be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(2048)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot listen there: {error}", f"{host}:{port}", "Choose another --port or --host."
        ) from None
    bound.setblocking(False)
    return bound


def serve(
    loader: Callable[[str | None], ServedModel],
    settings: ServerSettings,
    name: str,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT; then drain. A second signal ends at once. Raises what loading raises, and
    UsageError for settings that do not hold."""
    settings.check()
    check_libraries(settings.tracing)
    bound = bind(settings.host, settings.port)
    try:
        asyncio.run(_serve(bound, loader, settings, name, on_ready))
    finally:
        bound.close()


async def _serve(
    bound: socket.socket,
    loader: Callable[[str | None], ServedModel],
    settings: ServerSettings,
    name: str,
    on_ready: Callable[[str], None],
) -> None:
    from .app import make_app
    from .host import Host

    log = Log(settings.log_format)
    host = Host(loader, settings, log)
    app = make_app(host, settings, log, name)
    server = quiet_server(app, settings.head_seconds, lifespan="on" if settings.tracing else "off")
    port = bound.getsockname()[1]
    url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}"
    stopping = asyncio.Event()
    with _signals(host, stopping, log):
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            loading = asyncio.create_task(host.start())
            stop = asyncio.create_task(stopping.wait())
            await asyncio.wait({loading, stop, serving}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                log.event("ready", url=url, model=(settings.served_names or (name,))[0])
                on_ready(url)
                await asyncio.wait({stop, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                raise RunError("the HTTP server ended unasked", url)
            await host.drain(settings.drain_seconds)
            log.event("stopped")
        finally:
            await host.stop()
            server.should_exit = True
            await serving
            for task in (loading, stop):
                task.cancel()


def quiet_server(app: Any, head_seconds: float, lifespan: Literal["on", "off"] = "off") -> Any:
    """A uvicorn server that leaves signals and logs to us."""
    import uvicorn

    from .slow_heads import timed_protocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        http=timed_protocol(head_seconds),
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        lifespan=lifespan,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        timeout_keep_alive=30,
    )
    return Server(config)


@contextlib.contextmanager
def _signals(host: Any, stopping: asyncio.Event, log: Log) -> Iterator[None]:
    """The first signal drains, the next one ends the draining."""
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        log.event("stopping" if not stopping.is_set() else "stopping_now", signal=signal.Signals(number).name)
        if stopping.is_set():
            host.state = "stopped"
        stopping.set()

    caught = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in caught}
    for number in caught:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
