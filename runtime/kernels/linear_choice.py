"""Which kernel computes a packed linear layer, by (format, device, rows): measured once, kept in a cache file.

Every candidate first has to agree with `dequantize` (unpack, then `F.linear`) within `TOLERANCE`; then all are timed
in turn at each of `ROWS` on a layer of random codes, and the least time counts. The layer's weight is then warm in the
processor's caches, which in a whole model it is not. A layer uses at most one candidate that needs a second copy of its
weight, beside those that need none: the one with which the geometric mean of its times over `ROWS` is least. The file
is `linear-choices.json`; its entries hold for one torch, processor or GPU, build of the native kernels and number of
threads.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .build import NativeUnavailable, build, cache_dir
from .linear_candidates import CANDIDATES, LinearCase, Run
from .packed import PackedLinear

ROWS = (1, 4, 16, 64, 256, 1024)
"""Buckets: a number of rows belongs to the first that is not smaller, or to the last."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
QUANTIZED_TOLERANCE = 3e-2
"""Most ‖y - y_dequantize‖ / ‖y_dequantize‖ on normal inputs; the second where activations are quantized."""
LEAST_ROUNDS, MOST_ROUNDS, ROUND_SECONDS = 3, 50, 0.2
FOREIGN_LIMIT = 0.2
"""Share of the machine's CPU time that other processes may use while timings are taken that are to be kept."""
VERSION = 1


@dataclass
class Choice:
    """What was found for one case. microseconds: by rows and candidate, None where that number of rows cannot run."""

    microseconds: dict[int, dict[str, float | None]]
    refused: dict[str, str] = field(default_factory=dict)
    """Candidates that cannot run this case, or did not agree with `dequantize`, and why."""
    cached: bool = False
    foreign: float = 0.0
    """Share of the machine's CPU time that other processes used meanwhile."""

    @property
    def origin(self) -> str:
        """Where the timings come from."""
        if self.cached:
            return "measured before"
        if self.foreign > FOREIGN_LIMIT:
            return f"measured now, not kept: other processes used {self.foreign:.0%} of the CPU"
        return "measured now"

    def table(self, allow_quantized: bool = False) -> dict[int, str]:
        """The candidate of each bucket. allow_quantized: activations may be quantized."""
        known = [c for c in CANDIDATES.values() if c.name not in self.refused and (allow_quantized or not c.quantizes)]
        free = [c.name for c in known if not c.copies]
        tables = [self._fastest([*free, c.name]) for c in known if c.copies] + [self._fastest(free)]
        return min(
            tables, key=lambda table: sum(math.log(self.microseconds[r][n] or math.inf) for r, n in table.items())
        )

    def _fastest(self, names: list[str]) -> dict[int, str]:
        found = {}
        for rows, times in self.microseconds.items():
            found[rows] = min((n for n in names if times.get(n) is not None), key=lambda n: times[n] or math.inf)
        return found


def bucket(rows: int) -> int:
    """The bucket of a number of rows."""
    return next((size for size in ROWS if rows <= size), ROWS[-1])


def disagreement(case: LinearCase, name: str, run: Run, layer: PackedLinear, rows: int = 20) -> str | None:
    """Why a prepared candidate is not eligible: its outputs for normal inputs differ from `dequantize`'s, or None."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, case.in_features, generator=generator).to(case.device, case.dtype)
    want, got = CANDIDATES["dequantize"].prepare(layer)(x), run(x)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"gives {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
    allowed = TOLERANCE.get(case.dtype, 0.0)
    if CANDIDATES[name].quantizes:
        allowed = max(allowed, QUANTIZED_TOLERANCE)
    return None if error <= allowed else f"differs from dequantize by {error:.2g}, {allowed:g} allowed"


@torch.inference_mode()
def measure(case: LinearCase, rows: tuple[int, ...] = ROWS) -> Choice:
    """Prepare, check and time every candidate on a layer of random codes."""
    layer = case.synthetic()
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    for name, candidate in CANDIDATES.items():
        fits = [r for r in rows if candidate.unavailable(case, r) is None]
        reason = None if fits else candidate.unavailable(case, rows[0])
        if reason is None:
            try:
                runs[name] = candidate.prepare(layer)
                reason = disagreement(case, name, runs[name], layer, min(20, max(fits)))
            except Exception as error:  # torch's operators raise many kinds where a shape or device does not suit them
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150] if str(error) else ''}"
        if reason is not None:
            refused[name] = reason
            runs.pop(name, None)
    before = _cpu_seconds()
    times = {r: _time(case, runs, r) for r in rows}
    busy, own, total = (b - a for a, b in zip(before, _cpu_seconds()))
    return Choice(times, refused, foreign=min(max((busy - own) / total, 0.0), 1.0) if total > 0 else 0.0)


def _cpu_seconds() -> tuple[float, float, float]:
    """CPU seconds the machine was busy, those of this process, and all that passed."""
    import psutil

    times = psutil.cpu_times()._asdict()
    total = sum(value for name, value in times.items() if name not in ("guest", "guest_nice"))
    own = psutil.Process().cpu_times()
    return total - times["idle"] - times.get("iowait", 0.0), own.user + own.system, total


def _time(case: LinearCase, runs: dict[str, Run], rows: int) -> dict[str, float | None]:
    """Least microseconds of each candidate over rounds in which they take turns, after one round to warm up.

    Rounds end when each candidate's two least times are within a tenth, or after `ROUND_SECONDS`.
    """
    x = torch.randn(rows, case.in_features, generator=torch.Generator().manual_seed(0)).to(case.device, case.dtype)
    able = {name: run for name, run in runs.items() if CANDIDATES[name].unavailable(case, rows) is None}
    times: dict[str, list[float]] = {name: [] for name in able}
    until = time.perf_counter() + ROUND_SECONDS
    for number in range(1 + MOST_ROUNDS):
        for name, run in able.items():
            _synchronize(case)
            started = time.perf_counter()
            run(x)
            _synchronize(case)
            times[name].append(time.perf_counter() - started)
        if number == 0:
            times = {name: [] for name in able}
        elif number >= LEAST_ROUNDS and (time.perf_counter() > until or all(map(_settled, times.values()))):
            break
    return {name: round(min(times[name]) * 1e6, 1) if name in times else None for name in runs}


def _settled(times: list[float]) -> bool:
    least, second = sorted(times)[:2]
    return second <= 1.1 * least


def _synchronize(case: LinearCase) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


def choose(case: LinearCase, file: Path | None = None) -> Choice:
    """The case's choice: from the cache, else measured now and kept there. file: the cache; None: `choices_file()`.

    What was measured while other processes were busy is used, but not kept.
    """
    file = file or choices_file()
    key, environment = case_key(case), environment_key(case.device)
    entry = read_choices(file).get(environment, {}).get("cases", {}).get(key)
    if entry is not None:
        times = {int(rows): by_name for rows, by_name in entry["microseconds"].items()}
        return Choice(times, entry["refused"], cached=True)
    choice = measure(case)
    if choice.foreign <= FOREIGN_LIMIT:
        _keep(file, environment, case.device, key, choice)
    return choice


def choices_file() -> Path:
    return cache_dir() / "linear-choices.json"


def case_key(case: LinearCase) -> str:
    """Such as `1536x576 int4 g64 bfloat16 2 threads`."""
    threads = f" {torch.get_num_threads()} threads" if case.device == "cpu" else ""
    interpreted = " interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{case.out_features}x{case.in_features} {case.format} {dtype}{threads}{interpreted}"


def environment_key(device: str) -> str:
    """What timings hold for: torch, the processor's or GPU's name, the native kernels' build."""
    return " | ".join((f"v{VERSION}", f"torch {torch.__version__}", device_name(device), kernels_name()))


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def kernels_name() -> str:
    """The native library's file name, which names its sources, flags and processor; `no native kernels` without."""
    try:
        return build().stem
    except NativeUnavailable:
        return "no native kernels"


def read_choices(file: Path) -> dict[str, Any]:
    """Environment → {"device", "cases"}. A file that is absent or damaged counts as empty: all is measured again."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(file: Path, environment: str, device: str, key: str, choice: Choice) -> None:
    """Add one entry; a cache folder that cannot be written is no error, the next process measures again."""
    every = read_choices(file)
    cases = every.setdefault(environment, {"device": device, "cases": {}})["cases"]
    cases[key] = {"microseconds": {str(r): t for r, t in choice.microseconds.items()}, "refused": choice.refused}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=file.parent, prefix="linear-choices-")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(every, out, indent=1)
        os.replace(scratch, file)
    except OSError:
        return
