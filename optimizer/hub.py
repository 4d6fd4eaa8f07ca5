"""Uploads an artifact to the Hugging Face hub, with a model card that the manifest's hashes cover."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .errors import RunError, UsageError
from .manifest import MANIFEST, Manifest
from .model_card import CARD, model_card
from .sources import HUB_ID


def check_repository(repository: str) -> None:
    """Raise UsageError where `repository` is not of the form org/name."""
    if not HUB_ID.match(repository):
        raise UsageError(f"{repository!r} is not a repository", "--push-to-hub", "Give a name of the form org/name")


def push_to_hub(folder: Path, manifest: Manifest, repository: str, private: bool = False) -> str:
    """Upload every file of an artifact in one commit, and return its address.

    A folder without a model card gets one there: the uploaded manifest names its hash, so that what is downloaded
    verifies. Raises RunError where the hub refuses or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    check_repository(repository)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    contents: dict[str, bytes] = {}
    if CARD not in files:
        contents[CARD] = model_card(manifest, repository.rpartition("/")[2]).encode()
        hashes = {**manifest.files, CARD: hashlib.sha256(contents[CARD]).hexdigest()}
        stamped = manifest.model_copy(update={"files": hashes})
        contents[MANIFEST] = stamped.model_dump_json(indent=2).encode() + b"\n"
    operations = [
        CommitOperationAdd(name, contents[name] if name in contents else str(files[name]))
        for name in sorted({*files, *contents})
    ]
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.create_commit(repository, operations, commit_message=f"Upload {folder.name} made by llmopt")
    except Exception as error:  # the hub's client raises many kinds, of HTTP and of its own
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"the hub refused the upload ({first})", repository, "Log in with `hf auth login`, or check the name"
        ) from None
    return str(done.commit_url)
