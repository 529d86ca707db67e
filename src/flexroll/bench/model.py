"""`flexroll model`: bring the checkpoint here, see that it is whole, and write down what it is."""

from __future__ import annotations

import json
from pathlib import Path

from flexroll.bench.checkpoint import check_checkpoint, hash_files
from flexroll.bench.console import say
from flexroll.schema.config import Config
from flexroll.schema.records import write_json


def prepare_model(config: Config, out: Path, root: Path) -> None:
    """Write {name, source, path, revision, files: {name: sha256}, dtype}; `path` is relative inside the tree.

    Raises:
        FlexrollError: the checkpoint is missing, damaged, or cannot be fetched.
    """
    model = config.model
    folder = root / "models" / model.name
    if model.source == "hub":
        from flexroll.bench.hub import fetch_model

        assert model.repo and model.revision  # the config's own check
        fetch_model(model.repo, model.revision, folder, say)
    elif model.source == "random":
        from flexroll.bench.random_model import write_random

        assert model.path
        say(f"random weights for {root / model.path}")
        write_random(root / model.path, folder, model.dtype, model.seed)
    else:
        assert model.path
        folder = root / model.path
    check_checkpoint(folder)
    data = {
        "name": model.name,
        "source": model.repo
        if model.source == "hub"
        else f"random weights, seed {model.seed}"
        if model.source == "random"
        else "local",
        "path": _relative(folder, root),
        "revision": model.revision,
        "files": hash_files(folder, say),
        "dtype": model.dtype,
    }
    write_json(out, json.dumps(data, indent=1) + "\n")


def _relative(path: Path, root: Path) -> str:
    path, root = path.resolve(), root.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
