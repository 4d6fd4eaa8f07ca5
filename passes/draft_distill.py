"""Trains a small draft model on what the target writes, for so many minutes.

First the target writes texts and reads others (half of the time), then the student, some layers of the target with its
embeddings and head, learns the target's distribution of each next token (Hinton et al. 2015,
https://arxiv.org/abs/1503.02531; on texts of the target's own as in DistillSpec, Zhou et al. 2023,
https://arxiv.org/abs/2310.08461). How many texts and steps the minutes allow is measured at the beginning and kept with
the checkpoint: from there on everything follows from the seed, so that a run that was killed goes on to the result that
it would have had.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.base import Context
from ..optimizer.checkpoint import Checkpoint
from ..optimizer.errors import RunError
from ..optimizer.files import cache_dir, replace_folder, temporary_sibling, write_atomic
from .draft_loss import Head, agreement, batch_loss
from .draft_student import layer_sets, layers_of, prune, save, set_trainable
from .draft_texts import Texts, Writer

if TYPE_CHECKING:
    import torch

    from ..optimizer.model import LoadedModel

ROUND, LENGTH, BATCH = 16, 128, 4
"""Texts that are written at a time, their most tokens, and texts of a training step."""
WRITING, SPARE = 0.5, 0.05
"""Shares of the time for writing, and for what comes after the training."""
MOST_ROUNDS, SEGMENTS = 256, 20
"""Rounds of texts at most; parts of the training after each of which a checkpoint is written."""
RATE, WARM_UP = 8e-4, 0.1
"""Adam's learning rate at its highest, and the share of the steps in which it rises to that; then it falls to 0."""
REPORT = "distillation.json"


@dataclass
class Schedule:
    """What the time allows: decided once. layers: of the target, of which the student is made."""

    layers: list[int]
    rounds: int
    steps: int

    @property
    def segment(self) -> int:
        return max(1, -(-self.steps // SEGMENTS))


def folder_of(model: LoadedModel, context: Context, options: dict[str, Any]) -> Path:
    """Where the student of this model, as it is now, with these options lies in the cache."""
    from ..optimizer.environment import library_version

    digest = sha256(
        json.dumps([options, context.seed, model.source.sha256, model.runtime.linear.model_dump()]).encode()
    )
    digest.update(json.dumps([library_version(name) for name in ("llmopt", "torch", "transformers")]).encode())
    for name, tensor in model.module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().view(-1).view(_bytes()).numpy())
    return cache_dir() / "drafts" / digest.hexdigest()[:32]


def _bytes() -> Any:
    import torch

    return torch.uint8


class Distillation:
    """One student's making. runner: of the target, with an unused pool. held_out: calibration sequences that the result
    is measured on, which are kept out of the training. clock: seconds.
    """

    def __init__(
        self,
        model: LoadedModel,
        context: Context,
        folder: Path,
        minutes: float,
        num_layers: int | None,
        held_out: Sequence[Sequence[int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        import torch

        self.model, self.context, self.folder, self.clock = model, context, folder, clock
        self.budget, self.num_layers, self.held_out = 60 * minutes, num_layers, held_out
        self.checkpoint = Checkpoint(folder / "progress", {"threads": torch.get_num_threads()})
        self.began = clock()

    def run(self, runner: Any) -> dict[str, Any]:
        """Train, or go on, and save the student into `folder / "draft"`; returns the report."""
        target = self.folder / "draft"
        if (target / REPORT).is_file():
            return json.loads((target / REPORT).read_text(encoding="utf-8"))
        whole = self._float_model()
        writer = self._writer(runner)
        if self.checkpoint.prepared is None:
            self._prepare(whole, writer)
        schedule = Schedule(**self.checkpoint.prepared)
        texts = self._texts(writer, schedule.rounds)
        student = prune(whole, schedule.layers)
        del whole
        report = self._train(student, texts, schedule)
        self._save(student, target, report)
        return report

    def _float_model(self) -> Any:
        """The source in float32, where its layers can be trained."""
        from ..optimizer.source_model import load_source
        from ..runtime.open import resolve_device

        module: Any = load_source(self.model.source, "float32", self.model.trust_remote_code).module
        layers = layers_of(module)
        if any(not p.is_floating_point() for p in layers.parameters()) or not list(layers.parameters()):
            raise RunError("the source's layers are quantized and cannot be trained", "draft.distill")
        return module.to(resolve_device("auto"))

    def _writer(self, runner: Any) -> Writer:
        from ..optimizer.self_text import end_tokens, openings

        tokenizer = self.model.tokenizer
        held = {tuple(sequence) for sequence in self.held_out}
        sequences = [batch[0].tolist() for batch in self.context.calibration.batches()]
        sequences = [s for s in sequences if not any(tuple(s[: len(h)]) == h for h in held)]
        ends = end_tokens(self.model.source.folder, tokenizer)
        length = min(LENGTH, runner.max_model_len)
        return Writer(runner, openings(tokenizer), sequences, ends, length, self.context.seed)

    def _prepare(self, whole: Any, writer: Writer) -> None:
        """Choose the layers and see how much the time allows."""
        started = self.clock()
        first = writer.round(0, ROUND)
        writing = self.clock() - started
        count = len(layers_of(whole))
        wanted = self.num_layers or max(1, round(count / 10))
        losses = {}
        for layers in layer_sets(count, wanted):
            student = prune(whole, layers)
            losses[layers] = self._loss(student, Head(student), first)
        layers = min(losses, key=lambda one: losses[one])
        student = prune(whole, layers)
        set_trainable(student)
        for _ in range(2):  # the first one warms up
            started = self.clock()
            batch_loss(student, Head(student), _taken(first, range(BATCH)), _generator(0)).backward()
            step = 1.1 * (self.clock() - started)
        rounds = int(min(max(2.0, WRITING * self.budget / writing), MOST_ROUNDS))
        left = (1 - SPARE) * self.budget - (self.clock() - self.began) - (rounds - 1) * writing
        self.checkpoint.prepare(asdict(Schedule(list(layers), rounds, max(1, int(left / step)))))
        self.checkpoint.commit(first.as_tensors(), {"round": 0})

    def _texts(self, writer: Writer, rounds: int) -> list[Texts]:
        from safetensors.torch import load_file

        for number in range(self.checkpoint.done, rounds):
            made = writer.round(number, ROUND)
            self.checkpoint.commit(made.as_tensors(), {"round": number})
            self.context.progress(number + 1, rounds, "the model writes texts", left=self._left())
        return [Texts.of(load_file(path)) for path in self.checkpoint.files[:rounds]]

    def _train(self, student: Any, rounds: list[Texts], schedule: Schedule) -> dict[str, Any]:
        import torch

        parameters = set_trainable(student)
        head, held, texts = Head(student), rounds[0], Texts.joined(rounds[1:])
        optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=0.0)
        before = {"agreement": agreement(student, head, held), "loss": self._loss(student, head, held)}
        done = self._resume(parameters, optimizer, schedule)
        curve = [point for i in range(schedule.rounds, self.checkpoint.done) for point in self.checkpoint.data(i)]
        while done < schedule.steps:
            losses = []
            for step in range(done, min(done + schedule.segment, schedule.steps)):
                losses.append(self._step(student, head, texts, optimizer, step, schedule.steps))
            done += len(losses)
            curve.append([done, round(sum(losses) / len(losses), 4)])
            live = self.checkpoint.next_live()
            _save_state(live, parameters, optimizer)
            self.checkpoint.commit({"step": torch.tensor([done])}, curve[-1:], live)
            said = f"distilling, loss {curve[-1][1]:.3f}"
            self.context.progress(done, schedule.steps, said, loss=curve[-1][1], left=self._left())
        after = {"agreement": agreement(student, head, held), "loss": self._loss(student, head, held)}
        return {
            "layers": schedule.layers,
            "texts": (schedule.rounds - 1) * ROUND,
            "tokens": int(texts.lengths.sum()),
            "steps": schedule.steps,
            "trained_parameters": sum(p.numel() for p in parameters.values()),
            "before": {name: round(value, 4) for name, value in before.items()},
            "after": {name: round(value, 4) for name, value in after.items()},
            "loss_curve": curve,
        }

    def _step(self, student: Any, head: Head, texts: Texts, optimizer: Any, step: int, steps: int) -> float:
        """One step on texts that follow from the seed and the step's number; returns the loss before it."""
        import torch

        generator = _generator(self.context.seed * 1_000_003 + step)
        chosen = torch.randperm(len(texts), generator=generator)[:BATCH].tolist()
        loss = batch_loss(student, head, _taken(texts, chosen), generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        warm = max(1, int(WARM_UP * steps))
        share = (step + 1) / warm if step < warm else (steps - step) / max(1, steps - warm)
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = RATE * min(1.0, share)
        optimizer.step()
        value = float(loss.detach())
        if value != value:
            raise RunError(f"the loss of step {step} is not a number", "draft.distill", "Try more minutes or layers.")
        return value

    def _resume(self, parameters: dict[str, Any], optimizer: Any, schedule: Schedule) -> int:
        """Take the state of the last segment; returns the number of steps done."""
        if self.checkpoint.done <= schedule.rounds or self.checkpoint.live is None:
            return 0
        _load_state(self.checkpoint.live, parameters, optimizer)
        done = int(self.checkpoint.data(self.checkpoint.done - 1)[-1][0])
        self.context.note("note", f"distillation goes on after step {done} of {schedule.steps}")
        return done

    def _loss(self, student: Any, head: Head, texts: Texts) -> float:
        import torch

        with torch.no_grad():
            return float(batch_loss(student, head, texts, _generator(self.context.seed)))

    def _save(self, student: Any, target: Path, report: dict[str, Any]) -> None:
        temporary = temporary_sibling(target)
        try:
            save(student, self.model.tokenizer, temporary, self.model.dtype)
            write_atomic(temporary / REPORT, json.dumps(report))
            replace_folder(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(self.checkpoint.folder, ignore_errors=True)

    def _left(self) -> float:
        """Seconds."""
        return max(0.0, self.budget - (self.clock() - self.began))


def _generator(seed: int) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(seed % 2**63)


def _taken(texts: Texts, chosen: Sequence[int]) -> Texts:
    places = list(chosen)
    return Texts(texts.tokens[places], texts.lengths[places], texts.indices[places], texts.log_probs[places])


def _save_state(folder: Path, parameters: dict[str, Any], optimizer: Any) -> None:
    """Parameters and Adam's moments as safetensors."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"value.{name}"] = parameter.detach().contiguous()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value.detach().contiguous()
    save_file(tensors, folder / "state.safetensors")


def _load_state(folder: Path, parameters: dict[str, Any], optimizer: Any) -> None:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "state.safetensors")
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(tensors[f"value.{name}"])
        keys = ("exp_avg", "exp_avg_sq")
        optimizer.state[parameter] = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in keys}
        optimizer.state[parameter]["step"] = tensors[f"step.{name}"]
