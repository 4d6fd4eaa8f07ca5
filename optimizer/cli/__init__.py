"""The command line: `llmopt COMMAND`. Heavy libraries are imported by the commands that need them."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any

import click

from ... import __version__
from ..errors import LlmoptError
from . import bench, catalog, compare, diff, doctor, eval, export, generate, inspect, optimize, report, serve, tune


class Group(click.Group):
    """Keeps the commands in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmopt")
def cli() -> None:
    """Turn a language model and a recipe into a smaller, faster artifact that has proved itself, and run it."""


for command in (
    optimize.optimize,
    optimize.plan,
    tune.tune,
    inspect.inspect,
    inspect.verify,
    report.report,
    compare.compare,
    export.export,
    generate.generate,
    serve.serve,
    eval.evaluate,
    bench.bench,
    diff.diff,
    catalog.passes,
    catalog.exporters,
    catalog.recipes,
    doctor.doctor,
):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 the run failed, 2 the request is wrong, 130 interrupted."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(cli.main(args=arguments, prog_name="llmopt", standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except LlmoptError as error:
        click.echo(f"llmopt: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("llmopt: interrupted; nothing half-written is left", err=True)
        sys.exit(130)
    except RecursionError:
        click.echo("llmopt: a file or value is nested too deeply to be read", err=True)
        sys.exit(1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        name = str(error.filename or "")
        click.echo(f"llmopt: {name[:80] + '…: ' if len(name) > 80 else name and name + ': '}{error.strerror}", err=True)
        sys.exit(2 if error.errno == errno.ENAMETOOLONG else 1)


def _terminate(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
