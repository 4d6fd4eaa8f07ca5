"""A decoder graph open in onnxruntime, called step by step with its KV cache. Needs numpy and onnxruntime alone.

Graphs of two kinds, told apart by their inputs. With `position_ids` a batch of unequal prompts is padded on the left,
and the mask says where; keys and values come back longer at every step. Without them (GroupQueryAttention) prompts are
padded on the right, every sequence starts at slot 0, and keys and values stay in buffers that are read and written in
place, so that a step copies nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...optimizer.errors import MissingDependency, RunError, UsageError

GROWTH = 256
"""Buffers hold a multiple of this many tokens."""
DEVICES: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("CUDAExecutionProvider",),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider"),
}
"""Device → onnxruntime's providers before the CPU's: what one has no operator for goes to the next."""
ELEMENTS = {"tensor(float)": "float32", "tensor(float16)": "float16"}


@dataclass
class OnnxCache:
    """Keys and values of a batch.

    lengths: int64 [rows], tokens of each sequence. mask: int64 [rows, slots], which slots hold a token (padded on the
    left). past: one value for each cache input of the graph.
    """

    lengths: np.ndarray
    mask: np.ndarray
    past: list[Any] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.lengths)


class OnnxSession:
    """Opens `folder`'s model.onnx.

    device: "cpu", "cuda", "tensorrt", perhaps with a number (cuda:1), or "auto". threads: of one operator, None lets
    onnxruntime choose. file: the graph's name.
    Raises MissingDependency, UsageError for a device that is not there, RunError for a graph that is no decoder.
    """

    def __init__(self, folder: Path, device: str = "cpu", threads: int | None = None, file: str = "model.onnx") -> None:
        self.folder, self.library = folder, _library()
        kind, self.device_id = _device(self.library, device)
        self.device, self._providers = ("cpu" if kind == "cpu" else "cuda"), DEVICES[kind]
        self.session = self._open(folder / file, threads)
        inputs = {value.name: value for value in self.session.get_inputs()}
        outputs = {value.name: value for value in self.session.get_outputs()}
        self.past_names = [name for name in inputs if name.startswith("past_key_values.")]
        self.present_names = [name.replace("past_key_values.", "present.") for name in self.past_names]
        if (
            "input_ids" not in inputs
            or "attention_mask" not in inputs
            or "logits" not in outputs
            or not self.past_names
        ):
            raise RunError("the graph is no decoder with a KV cache", str(folder / file), "Export it again")
        missing = [name for name in self.present_names if name not in outputs]
        if missing:
            raise RunError(f"the graph has no output {missing[0]}", str(folder / file), "Export it again")
        self.pads_left = "position_ids" in inputs
        cache = inputs[self.past_names[0]]
        self.kv_heads, self.head_dim = int(cache.shape[1]), int(cache.shape[3])
        self.element = ELEMENTS.get(cache.type, "")
        """Of keys and values, and of what is computed."""
        if not self.element:
            raise RunError(f"keys and values are {cache.type}", str(folder / file), "Export with dtype float32")
        self.vocab_size = int(outputs["logits"].shape[2])
        self.metadata: dict[str, str] = dict(self.session.get_modelmeta().custom_metadata_map)

    def _open(self, path: Path, threads: int | None) -> Any:
        options = self.library.SessionOptions()
        options.log_severity_level = 3
        if threads:
            options.intra_op_num_threads = threads
        providers: list[Any] = [(name, {"device_id": self.device_id}) for name in self._providers]
        providers.append("CPUExecutionProvider")
        try:
            return self.library.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # onnxruntime raises kinds of its own that share no base
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RunError(f"onnxruntime does not open the graph ({first[:300]})", str(path)) from error

    @property
    def providers(self) -> list[str]:
        """What runs the graph, first choice first."""
        return [str(name) for name in self.session.get_providers()]

    def new_cache(self, rows: int) -> OnnxCache:
        """An empty cache for `rows` sequences."""
        cache = OnnxCache(np.zeros(rows, np.int64), np.zeros((rows, 0), np.int64))
        cache.past = [
            self._value(np.zeros((rows, self.kv_heads, 0, self.head_dim), self.element)) for _ in self.past_names
        ]
        return cache

    def join(self, parts: Sequence[tuple[OnnxCache, int, int]]) -> OnnxCache:
        """A cache whose rows are rows of others: of each the cache, the row's number, and the tokens to keep of it."""
        counts = np.array([count for _, _, count in parts], np.int64)
        slots = int(counts.max())
        room = slots if self.pads_left else -(-(slots + 1) // GROWTH) * GROWTH
        past = []
        for layer in range(len(self.past_names)):
            held = {id(cache): cache.past[layer].numpy() for cache, _, _ in parts}
            array = np.zeros((len(parts), self.kv_heads, room, self.head_dim), self.element)
            for row, (cache, number, count) in enumerate(parts):
                first = cache.mask.shape[1] - cache.lengths[number] if self.pads_left else 0
                place = slice(room - count, room) if self.pads_left else slice(0, count)
                array[row, :, place] = held[id(cache)][number][:, first : first + count]
            past.append(self._value(array))
        mask = (np.arange(room)[None, :] >= room - counts[:, None]).astype(np.int64)
        return OnnxCache(counts, mask if self.pads_left else np.zeros((len(parts), 0), np.int64), past)

    def run(self, ids: Sequence[Sequence[int]], cache: OnnxCache) -> list[np.ndarray]:
        """Run each row's new tokens; float32 logits [new tokens of that row, vocab] of every row.

        Rows of unequal length only with an empty cache. Raises UsageError where a graph without positions would have to
        run several tokens a row of several rows behind a cache.
        """
        counts = np.array([len(row) for row in ids], np.int64)
        width = int(counts.max())
        if cache.lengths.any() and (counts != width).any():
            raise ValueError("rows of unequal length behind a cache")
        if not self.pads_left and cache.lengths.any() and width > 1 and cache.rows > 1:
            raise UsageError(
                "this graph runs several tokens behind a cache for one sequence at a time", str(self.folder)
            )
        logits = self._run_left(ids, width, cache) if self.pads_left else self._run_right(ids, width, cache)
        cache.lengths = cache.lengths + counts
        if self.pads_left:
            return [logits[row, width - count :] for row, count in enumerate(counts)]
        return [logits[row, :count] for row, count in enumerate(counts)]

    def _run_left(self, ids: Sequence[Sequence[int]], width: int, cache: OnnxCache) -> np.ndarray:
        tokens = np.array([[0] * (width - len(row)) + list(row) for row in ids], np.int64)
        fresh = np.array([[0] * (width - len(row)) + [1] * len(row) for row in ids], np.int64)
        mask = np.concatenate([cache.mask, fresh], axis=1)
        positions = np.clip(np.cumsum(mask, axis=1) - 1, 0, None)[:, -width:]
        binding = self._binding(tokens, mask, cache.past)
        binding.bind_cpu_input("position_ids", np.ascontiguousarray(positions))
        for name in self.present_names:
            binding.bind_output(name, self.device, self.device_id)
        self.session.run_with_iobinding(binding)
        logits, *cache.past = binding.get_outputs()
        cache.mask = mask
        return np.asarray(logits.numpy(), np.float32)

    def _run_right(self, ids: Sequence[Sequence[int]], width: int, cache: OnnxCache) -> np.ndarray:
        tokens = np.array([list(row) + [0] * (width - len(row)) for row in ids], np.int64)
        totals = cache.lengths + np.array([len(row) for row in ids], np.int64)
        slots = int(totals.max())
        mask = (np.arange(slots)[None, :] < totals[:, None]).astype(np.int64)
        self._reserve(cache, slots)
        binding = self._binding(tokens, mask, cache.past)
        for name, value in zip(self.present_names, cache.past):
            binding.bind_ortvalue_output(name, value)
        self.session.run_with_iobinding(binding)
        return np.asarray(binding.get_outputs()[0].numpy(), np.float32)

    def _binding(self, tokens: np.ndarray, mask: np.ndarray, past: Sequence[Any]) -> Any:
        """Inputs of a step, and the logits on the CPU as the first output."""
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", tokens)
        binding.bind_cpu_input("attention_mask", np.ascontiguousarray(mask))
        for name, value in zip(self.past_names, past):
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("logits", "cpu")
        return binding

    def _reserve(self, cache: OnnxCache, slots: int) -> None:
        """Have the buffers hold at least `slots` tokens, with what they hold now in front."""
        held = cache.past[0].shape()[2]
        if slots <= held:
            return
        room = -(-max(slots, 2 * held) // GROWTH) * GROWTH
        grown = []
        for value in cache.past:
            array = np.zeros((cache.rows, self.kv_heads, room, self.head_dim), self.element)
            if held:
                array[:, :, :held] = value.numpy()
            grown.append(self._value(array))
        cache.past = grown

    def _value(self, array: np.ndarray) -> Any:
        """An OrtValue on the session's device; on the CPU it is the array's own memory."""
        return self.library.OrtValue.ortvalue_from_numpy(array, self.device, self.device_id)


def _library() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependency("onnxruntime", "onnx", "running an ONNX graph") from None
    return onnxruntime


def _device(library: Any, device: str) -> tuple[str, int]:
    """A key of DEVICES and the device's number; "auto" is CUDA where onnxruntime has it. Raises UsageError."""
    there = library.get_available_providers()
    if device == "auto":
        return ("cuda" if DEVICES["cuda"][0] in there else "cpu"), 0
    kind, _, number = device.partition(":")
    if kind not in DEVICES or (number and not number.isdigit()):
        raise UsageError(f"onnxruntime has no device {device!r}", what_to_do=f"Use one of {', '.join(DEVICES)}")
    if any(provider not in there for provider in DEVICES[kind]):
        names = {"cuda": "CUDA", "tensorrt": "TensorRT"}
        raise UsageError(
            f"this onnxruntime has no {names[kind]}", f"device {device!r}", "Install onnxruntime-gpu in its place, or "
            "use cpu",
        )  # fmt: skip
    return kind, int(number or 0)
