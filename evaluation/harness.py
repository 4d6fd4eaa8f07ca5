"""lm-evaluation-harness over this package's engine: tasks run by what answers a user's prompts.

Requests go to the engine many at a time, which batches them continuously; log-likelihoods are its prompt logprobs.
Tokens are split between context and continuation as by the harness's own `hf` backend, so that the numbers compare.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import LlmoptError, MissingDependency, RunError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..runtime.completion import Completion
    from ..runtime.llm import LLM

AT_ONCE = 256
"""Requests that are handed to the engine together."""
MAX_LENGTH = 2048
"""Context of a model whose config states none (the harness's own default)."""
NEW_TOKENS = 256
"""Tokens generated where a task names no number (the harness's own default)."""


def harness_model(llm: LLM) -> Any:
    """`llm` as an `lm_eval.api.model.TemplateLM`, for `lm_eval.simple_evaluate`. Raises MissingDependency."""
    base = _library("lm_eval.api.model").TemplateLM

    class EngineLM(base):  # type: ignore[misc, valid-type]
        """`loglikelihood`, `loglikelihood_rolling` and `generate_until` by an LLM."""

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer, self.llm = llm.tokenizer, llm

        @property
        def eot_token_id(self) -> int:
            return int(llm.tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            bos = llm.tokenizer.bos_token_id
            return int(bos) if bos is not None else self.eot_token_id

        @property
        def max_length(self) -> int:
            return llm.context_length or MAX_LENGTH

        @property
        def tokenizer_name(self) -> str:
            return str(llm.tokenizer.name_or_path).replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            prefix = str(llm.tokenizer.decode([self.prefix_token_id]))
            if add_special_tokens is None and prefix and string.startswith(prefix):
                add_special_tokens = False
            more = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(llm.tokenizer.encode(string, **more))

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(
                llm.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            """requests: (texts, context ids, continuation ids). Log-probability, and whether greedy would say it."""
            answers = _loglikelihoods(llm, [(one[1], one[2]) for one in requests], self.max_length)
            for (texts, _, _), answer in zip(requests, answers):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            return answers

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            utils = _library("lm_eval.utils")
            pieces, owners = [], []
            for number, request in enumerate(requests):
                # One token less than the hf backend, whose model does not run a window's last token.
                for window in utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                ):
                    pieces.append(utils.make_disjoint_window(window))
                    owners.append(number)
            sums = [0.0] * len(requests)
            for owner, (value, _) in zip(owners, _loglikelihoods(llm, pieces, self.max_length)):
                sums[owner] += value
            return sums

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            answers = _generate(llm, [request.args for request in requests], self)
            for request, answer in zip(requests, answers):
                self.cache_hook.add_partial("generate_until", request.args, answer)
            return answers

    return EngineLM()


def run_tasks(
    llm: LLM,
    tasks: Sequence[str],
    *,
    manager: Any = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    samples: bool = False,
) -> dict[str, Any]:
    """Run tasks of the harness; by task: `metrics`, `stderr`, `num_items`, `num_fewshot`, `version`.

    manager: what `task_manager` gave; None finds the harness's own tasks. limit: items of each task. chat: through the
    chat template. samples: add each item's own result as `samples`.
    Raises MissingDependency, UsageError for an unknown task, RunError where the task's data cannot be had.
    """
    model = harness_model(llm)
    manager = manager or task_manager(tasks)
    if chat and not llm.tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template", "--chat")
    try:
        with _quiet():
            found = _library("lm_eval").simple_evaluate(
                model=model,
                tasks=list(tasks),
                task_manager=manager,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                log_samples=samples,
                bootstrap_iters=100,
            )
    except LlmoptError:
        raise
    except Exception as error:  # a task's own code and the library that fetches its data raise what they like
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        offline = "; HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise RunError(f"the harness failed: {reason}{offline}", f"tasks {','.join(tasks)}") from error
    return _results(found, samples)


def task_manager(tasks: Sequence[str], task_path: str | Path | None = None) -> Any:
    """The harness's index of tasks: of the folder where it has all that are named (reading the harness's own takes
    long), else of both. Raises MissingDependency, UsageError where the folder does not exist or a task is unknown."""
    make = _library("lm_eval.tasks").TaskManager
    if task_path is not None and not Path(task_path).is_dir():
        raise UsageError("there is no such folder of tasks", str(task_path))
    with _quiet():
        if task_path is not None:
            manager = make(include_path=str(task_path), include_defaults=False)
            if all(manager.match_tasks([name]) for name in tasks):
                return manager
        manager = make(include_path=None if task_path is None else str(task_path))
    check_tasks(tasks, manager)
    return manager


def check_tasks(tasks: Sequence[str], manager: Any) -> None:
    """Raise UsageError that names the first unknown task and the nearest known one."""
    if not tasks:
        raise UsageError("no task is named", "--tasks")
    for name in tasks:
        if not manager.match_tasks([name]):
            what = f"the harness has no task {name!r}"
            raise UsageError(
                what, "--tasks", f"{_nearest(name, manager.all_tasks)} --task-path adds a folder of your own"
            )


def _nearest(name: str, known: Sequence[str]) -> str:
    found = did_you_mean(name, known)
    return found if found.startswith("Did") else "`lm-eval ls tasks` lists them."


def _loglikelihoods(llm: LLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], limit: int) -> list[Any]:
    """(log-probability of the continuation, whether each of its tokens is the most likely) of each (context,
    continuation). Too long a context loses its beginning.

    Raises RunError where a continuation alone does not fit the engine's context of `limit` tokens.
    """
    from ..runtime.engine.sampling_params import SamplingParams

    longest = max((len(continuation) for _, continuation in pairs), default=0)
    if longest >= limit:
        raise RunError(f"a continuation of {longest} tokens does not fit the context of {limit}", "loglikelihood")
    params = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    answers: list[Any] = [None] * len(pairs)
    for start in range(0, len(order), AT_ONCE):
        part = order[start : start + AT_ONCE]
        prompts = [[*pairs[i][0], *pairs[i][1]][-limit:] for i in part]
        done: list[Completion] = llm.generate(prompts, params)  # type: ignore[assignment]
        for index, one in zip(part, done):
            count = len(pairs[index][1])
            scored = [t for t in (one.prompt_logprobs or [])[-count:] if t is not None] if count else []
            answers[index] = (sum(t.logprob for t in scored), all(t.rank == 1 for t in scored))
    return answers


def _generate(llm: LLM, arguments: Sequence[tuple[str, dict[str, Any]]], model: Any) -> list[str]:
    """The text of each (context, settings) up to the first stop string, which is left out."""
    prompts, params = [], []
    for context, settings in arguments:
        sampling = _sampling(dict(settings), llm)
        room = model.max_length - sampling.max_new_tokens
        if room < 1:
            what = f"{sampling.max_new_tokens} new tokens do not fit the context of {model.max_length}"
            raise RunError(what, "generate_until", "Use a task or a model with another limit.")
        prompts.append(model.tok_encode(context)[-room:] or [model.prefix_token_id])
        params.append(sampling)
    texts: list[str] = []
    for start in range(0, len(prompts), AT_ONCE):
        done = llm.generate(prompts[start : start + AT_ONCE], params[start : start + AT_ONCE])
        texts += [one.text for one in done]  # type: ignore[union-attr]
    return texts


def _sampling(settings: dict[str, Any], llm: LLM) -> Any:
    """The harness's `generation_kwargs` as SamplingParams; without `do_sample` greedy, as its `hf` backend."""
    from ..runtime.engine.sampling_params import SamplingParams

    until = settings.get("until") or []
    until = [until] if isinstance(until, str) else list(until)
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    new_tokens = next((int(settings[name]) for name in names if settings.get(name) is not None), NEW_TOKENS)
    temperature = float(settings.get("temperature") or 0.0)
    sampled = settings.get("do_sample", temperature > 0)
    known = {name: settings[name] for name in ("top_p", "top_k", "min_p") if sampled and settings.get(name) is not None}
    eos = llm.tokenizer.eos_token
    return SamplingParams(
        max_new_tokens=new_tokens,
        temperature=(temperature or 1.0) if sampled else 0.0,
        stop=tuple(text for text in dict.fromkeys([*until, *([eos] if eos else [])]) if text),
        **known,
    )


def _results(found: dict[str, Any], samples: bool) -> dict[str, Any]:
    """The harness's table of results by task, its `metric,filter` names made plain."""
    out: dict[str, Any] = {}
    for task, row in found["results"].items():
        metrics: dict[str, float] = {}
        errors: dict[str, float] = {}
        for key, value in row.items():
            name, _, kind = key.partition(",")
            label = name if kind in ("", "none") else f"{name} ({kind})"
            if isinstance(value, (int, float)) and kind:
                (errors if "_stderr" in name else metrics)[label.replace("_stderr", "")] = float(value)
        if not metrics:
            continue
        count = (found.get("n-samples") or {}).get(task) or {}
        out[task] = {
            "metrics": metrics,
            "stderr": {key: value for key, value in errors.items() if value == value},
            "num_items": count.get("effective"),
            "num_fewshot": (found.get("n-shot") or {}).get(task),
            "version": (found.get("versions") or {}).get(task),
        }
        if samples and task in (found.get("samples") or {}):
            out[task]["samples"] = [
                {"doc_id": one["doc_id"], "responses": one["resps"]} for one in found["samples"][task]
            ]
    return out


def _library(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        if (error.name or "").split(".")[0] == "lm_eval":
            raise MissingDependency("lm-eval", "eval", "running tasks (--tasks)") from None
        raise RunError(f"lm-eval cannot be imported ({error})", name, "pip install 'llmopt[eval]'") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it the harness logs errors only, and what it prints goes to standard error."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)
