"""`llmopt serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import yaml

from ..errors import RunError, UsageError

KEY_VARIABLE = "LLMOPT_API_KEY"


@click.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option("--api-key", "api_keys", multiple=True, help=f"Key that opens the API; also from ${KEY_VARIABLE}.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File of keys, one a line.")
@click.option("--admin-key-file", type=click.Path(path_type=Path), help="File of keys for /admin/reload, one a line.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without an API key.")
@click.option("--served-model-name", "names", multiple=True, help="Name in the API; may be repeated.")
@click.option("--max-model-len", type=click.IntRange(2), help="Most tokens of prompt and answer.")
@click.option("--max-queue", type=click.IntRange(0), default=256, show_default=True, help="Most waiting requests.")
@click.option("--max-body", type=click.IntRange(1024), default=4 * 2**20, show_default=True, help="Bytes of a body.")
@click.option("--request-timeout", type=click.FloatRange(0, min_open=True), help="Seconds a request may take.")
@click.option("--drain-timeout", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds to end in.")
@click.option(
    "--stall-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds without a step until /health fails.",
)
@click.option("--no-page", is_flag=True, help="No built-in page at /.")
@click.option("--log", "log_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-text", is_flag=True, help="Put prompts and answers into the log.")
@click.option("--tracing", is_flag=True, help="OpenTelemetry spans (extra opentelemetry; OTEL_* variables).")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Option of llmopt.load: max_num_seqs=64")
@click.option("--no-draft", is_flag=True, help="No speculative decoding, whatever the artifact says.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model's folder carries.")
def serve(model: str, **options: Any) -> None:
    """Serve an artifact or a model over HTTP, with OpenAI's API and a page to try it.

    SIGTERM and Ctrl-C let running requests finish, within --drain-timeout.
    """
    from ...runtime.server.serve import check_libraries
    from ...runtime.server.serve import serve as run

    check_libraries()
    from ...runtime.server.settings import ServerSettings

    server_settings = ServerSettings(
        host=options["host"],
        port=options["port"],
        api_keys=(*options["api_keys"], *_keys(options["api_key_file"]), *_from_environment()),
        admin_keys=_keys(options["admin_key_file"]),
        insecure=options["insecure"],
        served_names=options["names"],
        max_model_len=options["max_model_len"],
        max_queue=options["max_queue"],
        max_body_bytes=options["max_body"],
        request_seconds=options["request_timeout"],
        drain_seconds=options["drain_timeout"],
        stall_seconds=options["stall_timeout"],
        log_format=options["log_format"],
        log_text=options["log_text"],
        page=not options["no_page"],
        tracing=options["tracing"],
    ).check()
    more = engine_options(options["settings"])
    if options["no_draft"]:
        more["draft"] = False
    for name in ("device", "dtype", "trust_remote_code"):
        more[name] = options[name]

    def load(source: str | None) -> Any:
        return _load(source or model, server_settings.max_model_len, more)

    run(load, server_settings, Path(model).name or model, lambda url: click.echo(f"llmopt: {model} is served at {url}"))


def engine_options(settings: tuple[str, ...]) -> dict[str, Any]:
    """Keywords for `llmopt.load` from NAME=VALUE, values as in YAML. Raises UsageError for what is none."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"{setting!r} is not NAME=VALUE", "--set", "For example: --set max_num_seqs=64")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"the value of {name} is not valid YAML", "--set") from None
    return found


def _load(source: str, max_model_len: int | None, options: dict[str, Any]) -> Any:
    from ...runtime.llm import load
    from ...runtime.server.model import serve_llm
    from .generate import _resolve

    folder = Path(source) if Path(source).exists() else _resolve(source)
    try:
        llm = load(folder, **options)
    except TypeError as error:
        raise UsageError(f"llmopt.load does not take this: {error}", "--set") from None
    for note in llm.notes:
        if note["kind"] == "fallback":
            click.echo(f"{note['stage']}: {note['message']}", err=True)
    return serve_llm(llm, source, max_model_len)


def _keys(path: Path | None) -> tuple[str, ...]:
    """Keys of a file: one a line; empty lines and lines that begin with # do not count."""
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise RunError("the key file is not text", str(path)) from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UsageError("the key file holds no key", str(path), "Write one key a line.")
    return keys


def _from_environment() -> tuple[str, ...]:
    key = os.environ.get(KEY_VARIABLE, "")
    return (key,) if key else ()
