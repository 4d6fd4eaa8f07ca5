"""Compiles the native kernels at first use and loads them through ctypes.

The C++ sources beside this file use nothing but the C++17 standard library, so one compiler call of a few seconds
builds them for exactly the processor they run on. The library lies in a cache folder (`$LLMOPT_CACHE_DIR`, else
`~/.cache/llmopt`), named by the hash of sources, flags, compiler version and processor features.

Environment:

* `LLMOPT_CACHE_DIR`: where compiled libraries are kept.
* `CXX`: the compiler; otherwise the first of `g++`, `clang++`, `c++` on the path.
* `LLMOPT_KERNELS_ISA`: `native` (the default) or `portable`, which leaves the AVX-512 code paths out.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra")
COMPILE_TIMEOUT_S = 300


class NativeUnavailable(RuntimeError):
    """The native kernels cannot run here; the message says why."""


def cache_dir() -> Path:
    """The folder of compiled libraries."""
    root = os.environ.get("LLMOPT_CACHE_DIR")
    return Path(root).expanduser() if root else Path("~/.cache/llmopt").expanduser()


def find_compiler() -> str:
    """Path of a C++ compiler. Raises NativeUnavailable where there is none."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path:
            return path
    looked = f"$CXX = {wanted} was not found" if wanted else "none of g++, clang++, c++ is on the path"
    raise NativeUnavailable(f"no C++ compiler: {looked}")


def requested_isa() -> str:
    """`native` or `portable`, from `$LLMOPT_KERNELS_ISA`. Raises ValueError for anything else."""
    isa = os.environ.get("LLMOPT_KERNELS_ISA", "native")
    if isa not in ("native", "portable"):
        raise ValueError(f"LLMOPT_KERNELS_ISA must be 'native' or 'portable', not {isa!r}")
    return isa


def sources() -> list[Path]:
    """The C++ files, in a fixed order."""
    return sorted(SOURCE_DIR.glob("*.cpp"))


def cpu_features() -> str:
    """The processor's features, as the system names them."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _flags(isa: str) -> list[str]:
    flags = [*FLAGS, "-march=native" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "-mcpu=native"]
    if isa == "portable":
        flags.append("-DLLMOPT_PORTABLE")
    return flags


def _key(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for path in [*sources(), *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    digest.update("\0".join([version, *flags, cpu_features()]).encode())
    return digest.hexdigest()[:20]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            import fcntl
        except ImportError:  # no advisory locks: the atomic rename alone keeps a library whole
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the compiler did not run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NativeUnavailable(f"`{' '.join(command[:2])} …` failed: {' | '.join(lines[:5])}")


def _compile(compiler: str, flags: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        files = sources()
        objects = [str(Path(scratch) / f"{path.stem}.o") for path in files]
        commands = [[compiler, *flags, "-c", str(path), "-o", obj] for path, obj in zip(files, objects)]
        with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as executor:
            list(executor.map(_run, commands))
        library = Path(scratch) / target.name
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(library)])
        os.replace(library, target)


def build(isa: str | None = None) -> Path:
    """Path of the compiled library, compiling it if the cache has none. isa: `native`, `portable`, or None for
    `$LLMOPT_KERNELS_ISA`.

    Raises NativeUnavailable where there is no compiler, the cache folder cannot be written, or compilation fails.
    """
    compiler = find_compiler()
    flags = _flags(isa or requested_isa())
    folder = cache_dir()
    target = folder / f"kernels-{_key(compiler, flags)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "kernels.lock"):
            if not target.exists():
                _compile(compiler, flags, target)
    except OSError as error:
        raise NativeUnavailable(f"cannot write to the cache folder {folder}: {error}") from error
    return target


@lru_cache(maxsize=2)
def _load(isa: str) -> ctypes.CDLL:
    path = build(isa)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from error


def load() -> ctypes.CDLL:
    """The library, compiled and opened once a process. Raises NativeUnavailable with the reason."""
    return _load(requested_isa())


def unavailable_reason() -> str | None:
    """None where the native kernels work, else why they do not."""
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None
