"""Files from the Hugging Face hub at a pinned commit, checked against the hashes that the hub itself gives."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from flexroll.bench.checkpoint import KEPT, sha256_file
from flexroll.errors import FlexrollError, one_line

HELP = "check the network, or put the files in a folder and name it (source: local, source: file)"


def fetch_model(repo: str, revision: str, folder: Path, say: Callable[[str], None]) -> None:
    """Bring a repository's checkpoint files to `folder`; files that are there and right are not fetched again.

    Raises:
        FlexrollError: the hub cannot be reached, or a file does not have the hash the hub gives for it.
    """
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(repo):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    wanted = [f for f in info.siblings or [] if any(fnmatch(f.rfilename, pattern) for pattern in KEPT)]
    size = sum(f.size or 0 for f in wanted)
    if all(is_right(folder / f.rfilename, f) for f in wanted):
        say(f"{repo}: {len(wanted)} files are here and match")
        return
    free = shutil.disk_usage(_existing(folder)).free
    if size > free:
        raise FlexrollError(f"{repo} is {size / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free; make room")
    say(f"{repo}: fetching {len(wanted)} files, {size / 1e9:.2f} GB")
    with _hub_errors(repo):
        snapshot_download(repo, revision=revision, local_dir=folder, allow_patterns=list(KEPT))
    for file in wanted:
        if not is_right(folder / file.rfilename, file):
            raise FlexrollError(
                f"{folder / file.rfilename}: not {repo}'s file at {revision[:8]} (hash differs); delete it"
            )


def fetch_dataset_file(
    repo: str, revision: str, file: str, folder: Path, sha256: str | None, say: Callable[[str], None]
) -> Path:
    """One file of a dataset repository under `folder`. Raises FlexrollError when its sha256 is another."""
    from huggingface_hub import hf_hub_download

    path = folder / file
    if not (sha256 and path.exists() and sha256_file(path) == sha256):
        say(f"{repo}: fetching {file}")
        with _hub_errors(repo):
            path = Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision, local_dir=folder))
    check_sha256(path, sha256)
    return path


def check_sha256(path: Path, sha256: str | None) -> None:
    """Raises FlexrollError unless the file has that hash (None: nothing is asked)."""
    if sha256 is not None:
        found = sha256_file(path)
        if found != sha256:
            raise FlexrollError(
                f"{path}: sha256 is {found[:12]}..., prompts.sha256 {sha256[:12]}...; fetch it again or mend the config"
            )


def is_right(path: Path, file: Any) -> bool:
    """Whether a local file is the hub's: by sha256 for a large (LFS) file, by git's blob hash for a small one.

    Args:
        file: an entry of the hub's file list (rfilename, size, blob_id, lfs).
    """
    if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
        return False
    if file.lfs:
        return sha256_file(path) == file.lfs.sha256
    data = path.read_bytes()
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()
    return blob == file.blob_id


class _hub_errors:
    """Context: whatever the hub client raises becomes one line that says what to do."""

    def __init__(self, repo: str) -> None:
        self.repo = repo

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, Exception):
            raise FlexrollError(f"cannot fetch {self.repo} from the hub ({one_line(error, 160)}); {HELP}") from error


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())
