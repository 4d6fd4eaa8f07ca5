"""Other people's clients against a running server: openai, LangChain, litellm.

    llmopt serve FOLDER --port 8000 &
    python benchmarks/serve_clients.py http://127.0.0.1:8000      # in an environment that has these clients

Each check is printed; exits 1 where one fails. Clients that are not installed are skipped and named.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def openai_checks(url: str) -> dict[str, Callable[[], Any]]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id

    def completion() -> None:
        answer = client.completions.create(model=model, prompt="The sky is", max_tokens=8, temperature=0, logprobs=2)
        assert answer.usage.completion_tokens == 8 and len(answer.choices[0].logprobs.tokens) == 8

    def completion_stream() -> None:
        whole = client.completions.create(model=model, prompt="The sky is", max_tokens=12, temperature=0)
        parts = client.completions.create(model=model, prompt="The sky is", max_tokens=12, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text

    def chat() -> None:
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, max_completion_tokens=12, logprobs=True, top_logprobs=3, seed=1, n=2
        )
        assert len(answer.choices) == 2 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
        again = [*QUESTION, answer.choices[0].message.model_dump(), {"role": "user", "content": "And of Spain?"}]
        assert client.chat.completions.create(model=model, messages=again, max_tokens=5).choices

    def chat_stream() -> None:
        options: Any = {"include_usage": True}
        parts = list(
            client.chat.completions.create(
                model=model, messages=QUESTION, max_tokens=20, stream=True, stream_options=options
            )
        )
        assert parts[-1].usage.completion_tokens <= 20 and not parts[-1].choices
        assert parts[0].choices[0].delta.role == "assistant"

    def leave_a_stream() -> None:
        with client.chat.completions.create(model=model, messages=QUESTION, max_tokens=400, stream=True) as parts:
            for number, _ in enumerate(parts):
                if number == 3:
                    break

    def schema() -> None:
        form: Any = FORM
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, response_format=form, max_tokens=100, temperature=0
        )
        assert set(json.loads(answer.choices[0].message.content)) == {"city", "large"}

    def errors() -> None:
        expect(openai.NotFoundError, lambda: client.completions.create(model="no such", prompt="x"))
        expect(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="x", temperature=9))
        bias = {"99999999": 1}
        expect(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="x", logit_bias=bias))
        long = expect(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="a " * 100_000))
        assert long.code == "context_length_exceeded"

    async def many() -> None:
        import asyncio

        several = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        work = [several.completions.create(model=model, prompt=f"{i} is", max_tokens=8) for i in range(32)]
        assert len(await asyncio.gather(*work)) == 32
        await several.close()

    def parallel() -> None:
        import asyncio

        asyncio.run(many())

    checks = (completion, completion_stream, chat, chat_stream, leave_a_stream, schema, errors, parallel)
    return {f"openai {check.__name__}": check for check in checks}


def langchain_checks(url: str) -> dict[str, Callable[[], Any]]:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model_name(url), temperature=0, max_tokens=60)

    def invoke() -> None:
        assert chat.invoke("Hello").usage_metadata["output_tokens"] > 0

    def stream() -> None:
        assert "".join(part.text for part in chat.stream("Hello")) == chat.invoke("Hello").text

    def structured() -> None:
        found = chat.with_structured_output({"title": "city", **SCHEMA}, method="json_schema").invoke("Paris?")
        assert set(found) == {"city", "large"}

    return {f"langchain {check.__name__}": check for check in (invoke, stream, structured)}


def litellm_checks(url: str) -> dict[str, Callable[[], Any]]:
    import litellm

    common = {"model": f"openai/{model_name(url)}", "api_base": f"{url}/v1", "api_key": "none", "messages": QUESTION}

    def completion() -> None:
        assert litellm.completion(**common, max_tokens=8).usage.completion_tokens == 8

    def stream() -> None:
        parts = list(litellm.completion(**common, max_tokens=8, stream=True, temperature=0))
        assert any(part.choices[0].delta.content for part in parts)

    def error() -> None:
        expect(litellm.BadRequestError, lambda: litellm.completion(**common, max_tokens=10**6, num_retries=0))

    return {f"litellm {check.__name__}": check for check in (completion, stream, error)}


def model_name(url: str) -> str:
    from urllib.request import urlopen

    with urlopen(f"{url}/v1/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


def expect(kind: type[Exception], work: Callable[[], Any]) -> Any:
    """The exception of this kind that the work must raise."""
    try:
        work()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def main(url: str) -> int:
    failed = 0
    for collect in (openai_checks, langchain_checks, litellm_checks):
        try:
            checks = collect(url.rstrip("/"))
        except ImportError as error:
            print(f"{collect.__name__}: skipped, {error.name} is not installed")
            continue
        for name, check in checks.items():
            try:
                check()
                print(f"{name}: ok")
            except Exception:
                failed += 1
                print(f"{name}: FAILED\n{traceback.format_exc()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
