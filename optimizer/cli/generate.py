"""`llmopt generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("prompts", nargs=-1)
@click.option("--max-new-tokens", "-n", type=click.IntRange(1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling.")
@click.option("--top-k", type=click.IntRange(1), help="Sample among the k most likely tokens.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the sampling.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be repeated.")
@click.option("--chat", is_flag=True, help="Put each prompt through the chat template.")
@click.option("--system", help="System message for --chat and -i.")
@click.option("--interactive", "-i", is_flag=True, help="Converse; an empty line or Ctrl-D ends it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that the model's folder carries.")
def generate(
    model: Path,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: tuple[str, ...],
    chat: bool,
    system: str | None,
    interactive: bool,
    as_json: bool,
    device: str,
    dtype: str,
    trust_remote_code: bool,
) -> None:
    """Generate text from an artifact or a model folder.

    Prompts come as arguments, else from standard input, one a line.
    """
    from ...runtime.llm import load

    if not interactive:
        prompts = prompts or _from_stdin()
    elif prompts:
        raise UsageError("-i reads its prompts from the terminal", "generate", "Leave the prompt out")
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    options.update({k: v for k, v in {"top_p": top_p, "top_k": top_k, "seed": seed}.items() if v is not None})
    if stop:
        options["stop"] = list(stop)
    folder = model if model.exists() else _resolve(str(model))
    with load(folder, device=device, dtype=dtype, trust_remote_code=trust_remote_code) as llm:
        for note in llm.notes:
            if note["kind"] == "fallback":
                click.echo(f"{note['stage']}: {note['message']}", err=True)
        if interactive:
            _converse(llm, options, system)
            return
        _answer(llm, prompts, options, chat, system, as_json)


def _answer(llm: Any, prompts: tuple[str, ...], options: dict[str, Any], chat: bool, system: str | None, as_json: bool):
    inputs: list[Any] = [_messages(prompt, system) if chat else prompt for prompt in prompts]
    if len(inputs) == 1 and not as_json:
        for chunk in llm.stream(inputs[0], **options):
            click.echo(chunk.text, nl=False)
        click.echo()
        return
    for prompt, completion in zip(prompts, llm.generate(inputs, **options)):
        if as_json:
            record = {"prompt": prompt, "text": completion.text, "token_ids": list(completion.token_ids)}
            click.echo(json.dumps({**record, "finish_reason": completion.finish_reason}, ensure_ascii=False))
        else:
            click.echo(f"{prompt}{'' if not chat else chr(10)}{completion.text}")
            click.echo()


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": prompt}]


def _converse(llm: Any, options: dict[str, Any], system: str | None) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            raise UsageError("standard input is not UTF-8 text", "generate") from None
        if not line:
            return
        messages.append({"role": "user", "content": line})
        said = []
        for chunk in llm.stream(messages, **options):
            said.append(chunk.text)
            click.echo(chunk.text, nl=False)
        click.echo()
        messages.append({"role": "assistant", "content": "".join(said)})


def _from_stdin() -> tuple[str, ...]:
    if sys.stdin.isatty():
        raise UsageError("no prompt is given", "generate", "Pass one as an argument, pipe them in, or use -i")
    try:
        prompts = tuple(line.rstrip("\n") for line in sys.stdin if line.strip())
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8 text", "generate") from None
    if not prompts:
        raise UsageError("standard input holds no prompt", "generate")
    return prompts


def _resolve(name: str) -> Path:
    from ..sources import resolve

    return resolve(name).folder
