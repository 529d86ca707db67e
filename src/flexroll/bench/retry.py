"""`flexroll retry`: clear what failed, is unreadable or is missing, so that the next run measures it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flexroll.errors import FlexrollError
from flexroll.schema.grpo_records import FOLDER as GRPO
from flexroll.schema.grpo_records import GrpoRecord, read_grpo
from flexroll.schema.quality import FOLDER as QUALITY
from flexroll.schema.quality import QualityRecord, read_quality
from flexroll.schema.records import MANIFEST, Record, read_record


def retry(results: Path) -> list[str]:
    """Delete the bad records of results/<run>, their jobs' manifests, bad quality and GRPO records; good ones are kept.

    Returns: one line a cleared cell, `path: why`.
    Raises:
        FlexrollError: there is no such run.
    """
    raw = results / "raw"
    if not raw.is_dir() and not (results / GRPO).is_dir():
        runs = sorted({p.parent.name for part in ("raw", GRPO) for p in results.parent.glob(f"*/{part}")})
        raise FlexrollError(f"{raw}: no such run; there are: {', '.join(runs) or 'none'}")
    cleared = []
    for folder in sorted(p for p in raw.glob("*") if p.is_dir()):
        manifest = folder / MANIFEST
        bad = {path: why for path in _expected(folder, manifest) if (why := _wrong(path))}
        for path, why in bad.items():
            path.unlink(missing_ok=True)
            cleared.append(f"{path.relative_to(raw)}: {why}")
        if bad:
            manifest.unlink(missing_ok=True)
    for folder, read in ((QUALITY, read_quality), (GRPO, read_grpo)):
        for path in sorted((results / folder).glob("*.json")):
            why = _wrong(path, read)
            if why:
                path.unlink()
                cleared.append(f"{path.relative_to(results)}: {why}")
    return cleared


def _expected(folder: Path, manifest: Path) -> list[Path]:
    """The records there are and those the manifest names; a manifest that cannot be read is removed."""
    names = {p.name for p in folder.glob("*.json")} - {manifest.name}
    if manifest.exists():
        try:
            names |= set(json.loads(manifest.read_text())["cells"])
        except (ValueError, KeyError, TypeError):
            manifest.unlink()
    return [folder / name for name in sorted(names)]


def _wrong(path: Path, read: Callable[[Path], Record | QualityRecord | GrpoRecord] = read_record) -> str:
    """Why a record is to be measured again; empty for a good or a skipped one."""
    try:
        record = read(path)
    except FlexrollError as error:
        return (
            "missing"
            if not path.exists()
            else "unreadable (" + str(error).split(";")[0].removeprefix(f"{path}: ") + ")"
        )
    return f"failed ({record.reason})" if record.status == "failed" else ""
