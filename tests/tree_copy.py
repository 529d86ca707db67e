"""A copy of the tree for tests that change it or run in it."""

from __future__ import annotations

import shutil
from pathlib import Path

PARTS = ("Snakefile", "config.yaml", "workflow", "profiles", "containers", "report", "src")


def copy_tree(root: Path, tree: Path, *more: str) -> Path:
    """What a workflow reads of the tree, and what `more` names: no results, environments or images."""
    for part in (*PARTS, *more):
        (tree / part).parent.mkdir(parents=True, exist_ok=True)
        if (root / part).is_dir():
            shutil.copytree(root / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(root / part, tree / part)
    return tree
