"""What the machine does while a load runs: CPU time of others, energy, memory. What it does not tell is said so."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NOISY = 0.05
"""Share of the machine's CPU time that other processes may have without a warning."""
POWERCAP = Path("/sys/class/powercap")
MODES = {0: "normal", 1: "SCHED_FIFO", 2: "SCHED_RR", 3: "SCHED_BATCH", 5: "SCHED_IDLE"}


class Meter:
    """Reads the machine's counters; `read` gives what changed since `start`.

    pids: processes whose CPU time is the benchmark's own, beside this one.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = [os.getpid(), *pids]
        self._energy: list[Rapl | Nvml] = [Rapl(), Nvml()]

    def start(self) -> Meter:
        self._before = cpu_seconds(self._pids)
        for source in self._energy:
            source.start()
        return self

    def read(self) -> dict[str, Any]:
        """`foreign_cpu`: share of the machine's CPU time that other processes had, 0 … 1 (None where it is not told);
        `cpu_seconds`: what the benchmark's own processes used, which neighbours inflate far less than the wall time;
        `energy`: joules by source, `cpu` and `gpu`, each a number or None beside a `…_note` that says why."""
        after = cpu_seconds(self._pids)
        share = foreign_share(self._before, after)
        own = None if self._before is None or after is None else round(after[1] - self._before[1], 3)
        energy: dict[str, Any] = {}
        for source in self._energy:
            energy[source.name], note = source.read()
            if note:
                energy[f"{source.name}_note"] = note
        return {"foreign_cpu": share, "cpu_seconds": own, "energy": energy}


def cpu_seconds(pids: Iterable[int]) -> tuple[float, float, float] | None:
    """(seconds that the machine's processors were busy, those of the processes and their children, all that passed)."""
    import psutil

    try:
        times = psutil.cpu_times()
    except (OSError, psutil.Error):
        return None
    idle = times.idle + getattr(times, "iowait", 0.0)
    total = sum(value for name, value in times._asdict().items() if name not in ("guest", "guest_nice"))
    return total - idle, sum(_process_seconds(pid) for pid in _families(pids)), total


def foreign_share(before: tuple[float, float, float] | None, after: tuple[float, float, float] | None) -> float | None:
    """Share of the time between two readings that the machine worked for others; None where no time passed."""
    if before is None or after is None or after[2] <= before[2]:
        return None
    busy, own, total = (b - a for a, b in zip(before, after))
    return round(min(max((busy - own) / total, 0.0), 1.0), 4)


def _families(pids: Iterable[int]) -> set[int]:
    import psutil

    found = set()
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {pid, *(child.pid for child in process.children(recursive=True))}
    return found


def _process_seconds(pid: int) -> float:
    import psutil

    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


class Rapl:
    """Energy of the processor packages, by Linux's powercap files (microjoules, which wrap around)."""

    name = "cpu"

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._before: dict[Path, int] = {}
        self._why = "" if self._zones else f"not available: no RAPL zone in {root}"

    def start(self) -> None:
        try:
            self._before = {zone: int((zone / "energy_uj").read_text()) for zone in self._zones}
        except (OSError, ValueError) as error:
            self._why = f"not available: {_reason(error)}"

    def read(self) -> tuple[float | None, str]:
        """Joules since `start`, and why there are none."""
        if self._why:
            return None, self._why
        total = 0
        try:
            for zone, before in self._before.items():
                gained = int((zone / "energy_uj").read_text()) - before
                total += gained if gained >= 0 else gained + int((zone / "max_energy_range_uj").read_text())
        except (OSError, ValueError) as error:
            return None, f"not available: {_reason(error)}"
        return total / 1e6, ""


class Nvml:
    """Energy of the NVIDIA GPUs, by NVML's counter (millijoules)."""

    name = "gpu"

    def __init__(self) -> None:
        self._why, self._handles = "", []
        try:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception as error:  # absent, or NVML without its driver: pynvml raises many kinds
            self._why = f"not available: {_reason(error)}"
        if not self._handles and not self._why:
            self._why = "not available: no NVIDIA GPU"

    def start(self) -> None:
        self._before = self._total()

    def read(self) -> tuple[float | None, str]:
        """Joules since `start`, and why there are none."""
        after = self._total()
        if self._before is None or after is None:
            return None, self._why
        return (after - self._before) / 1e3, ""

    def _total(self) -> int | None:
        if self._why:
            return None
        try:
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles)
        except Exception as error:  # old GPUs have no counter
            self._why = f"not available: {_reason(error)}"
            return None


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()


def own_memory() -> dict[str, Any]:
    """Peak memory of this process: `rss_bytes`, and `device_bytes` (what torch allocated on CUDA devices)."""
    import sys

    from ...runtime.memory import peak_memory

    found: dict[str, Any] = {"rss_bytes": peak_memory(), "device_bytes": None}
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {**found, "device_note": "not available: no CUDA device"}
    found["device_bytes"] = sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    return found


def process_memory(pids: Sequence[int], why: str = "") -> dict[str, Any]:
    """Peak resident memory of other processes and their children, by VmHWM; device memory is theirs to know."""
    found: dict[str, Any] = {"rss_bytes": None, "device_bytes": None, "device_note": "not available: another process"}
    if not pids:
        return {**found, "rss_note": f"not available: {why or 'no process is known'}"}
    peak = 0
    for pid in _families(pids):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            peak += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return {**found, "rss_bytes": peak} if peak else {**found, "rss_note": "not available: the system does not tell"}


def is_local(url: str) -> bool:
    return (urlsplit(url).hostname or "") in ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def listening_pids(url: str) -> list[int]:
    """Processes of this machine that listen on a local URL's port; empty where there are none or it is not told."""
    import psutil

    if not is_local(url):
        return []
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(psutil.Error, OSError):
        found = {
            c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
        }
        return sorted(pid for pid in found if pid is not None)
    return []


def about_machine() -> dict[str, Any]:
    """Processor, cores, scheduling class of this process."""
    import platform

    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_name() or platform.processor() or "unknown",
        "cores": cores,
        "scheduling": MODES.get(policy, str(policy)),
    }


def _cpu_name() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return ""
