"""Files: the cache folder, hashes, atomic folders, free space."""

from __future__ import annotations

import glob
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..runtime.artifact import sha256_file
from .errors import RunError

_numbers = itertools.count()
"""Makes temporary names of one process distinct."""


def cache_dir() -> Path:
    """Where llmopt keeps what it can make again: `$LLMOPT_CACHE_DIR`, else `llmopt` in the user's cache folder."""
    named = os.environ.get("LLMOPT_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llmopt"


@contextmanager
def sha256_cache() -> Iterator[dict[str, Any]]:
    """Known hashes by path, size and modification time, written back on leaving."""
    path = cache_dir() / "sha256.json"
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text())
    before = dict(known)
    yield known
    if known != before:
        with suppress(OSError):
            write_atomic(path, json.dumps(known))


def file_sha256(path: Path, known: dict[str, Any] | None = None) -> str:
    """SHA-256 of a file's contents. `known` (see `sha256_cache`) saves reading a file that has not changed."""
    stat = path.stat()
    key = str(path.resolve())
    stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    if known is not None and known.get(key, [None])[0] == stamp:
        return known[key][1]
    digest = sha256_file(path)
    if known is not None:
        known[key] = [stamp, digest]
    return digest


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def fsync_tree(folder: Path) -> None:
    """Flush every file of a folder, and the folder itself, to the disk.

    Files become readable by all who may read the folder: those of the safetensors library are its owner's alone.
    """
    readers = folder.stat().st_mode & 0o444
    for path in [*folder.rglob("*"), folder]:
        mode = path.stat().st_mode & 0o777
        if path.is_file() and mode & readers != readers:
            path.chmod(mode | readers)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def temporary_sibling(target: Path) -> Path:
    """An empty folder beside `target`, named after this process; siblings of dead processes are removed first."""
    prefix = f".{target.name}.tmp-"
    for old in target.parent.glob(f"{glob.escape(prefix)}*"):
        owner = old.name.removeprefix(prefix)
        pid = owner.partition("-")[0]
        if not pid.isdigit() or not alive(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    folder = target.parent / f"{prefix}{os.getpid()}-{next(_numbers)}"
    folder.mkdir(parents=True)
    return folder


@contextmanager
def scratch_folder(base: Path) -> Iterator[Path]:
    """A new folder below `base/work`, removed on leaving; those of dead processes are removed first."""
    work = base / "work"
    work.mkdir(parents=True, exist_ok=True)
    for old in work.iterdir():
        owner = old.name.partition("-")[0]
        if owner.isdigit() and not alive(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=work))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def alive(pid: int) -> bool:
    """Whether a process of that number runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def replace_folder(new: Path, target: Path, force: bool = True) -> None:
    """Put the folder `new` in the place of `target`; with `force` an existing one is moved aside, then removed.

    Raises RunError where `target` exists and `force` is not set.
    """
    aside = None
    if target.exists():
        if not force:
            raise RunError("another run has written it meanwhile", str(target), "Choose another --out, or pass --force")
        aside = target.with_name(f".{target.name}.old-{os.getpid()}")
        os.rename(target, aside)
    try:
        os.rename(new, target)
    except OSError:
        if aside is not None:
            os.rename(aside, target)
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise RunError where the disk of `folder` (or its nearest existing parent) has less than `needed` bytes free."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise RunError(
            f"{what} needs about {needed / 2**20:,.0f} MiB and the disk has {free / 2**20:,.0f} MiB free",
            str(folder),
            "Free some space or choose another folder",
        )


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
