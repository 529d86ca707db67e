"""`flexroll model`: bring the checkpoint here, see that it is whole, and write down what it is."""

from __future__ import annotations

import json
from pathlib import Path

from flexroll.bench.checkpoint import check_checkpoint, hash_files, read_config
from flexroll.bench.console import say
from flexroll.schema import architecture
from flexroll.schema.config import Config
from flexroll.schema.records import write_json
from flexroll.schema.sources import Model


def prepare_model(config: Config, out: Path, root: Path) -> None:
    """Write {name, source, path, revision, weights, files: {name: sha256}, dtype}; `path` is relative inside the tree.

    Where weights are drawn nothing is written beside it: `path` is the folder of the config.json itself.

    Raises:
        FlexrollError: the checkpoint is missing, damaged, or cannot be fetched.
    """
    model = config.model
    folder = root / "models" / model.name
    if model.source == "hub":
        from flexroll.bench.hub import fetch_model

        assert model.repo and model.revision  # the config's own check
        fetch_model(model.repo, model.revision, folder, say)
    else:
        assert model.path
        given = root / model.path
        if model.source == "local":
            folder = given
        elif model.weights == "drawn":
            folder = given.parent if given.is_file() else given
        else:
            from flexroll.bench.random_model import write_random

            say(f"random weights for {given}")
            write_random(given, folder, model.dtype, model.seed)
    if model.weights == "drawn":
        count = architecture.parameters(read_config(folder))
        say(f"{model.name}: {count / 1e9:.2f} G parameters, drawn by each engine; no weights are written")
        files = {name: digest for name, digest in hash_files(folder).items() if not name.endswith(".safetensors")}
    else:
        check_checkpoint(folder)
        files = hash_files(folder, say)
    data = {
        "name": model.name,
        "source": _source(model),
        "path": _relative(folder, root),
        "revision": model.revision,
        "weights": model.weights,
        "files": files,
        "dtype": model.dtype,
    }
    write_json(out, json.dumps(data, indent=1) + "\n")


def _source(model: Model) -> str:
    if model.source == "hub":
        return str(model.repo)
    if model.source == "local":
        return "local"
    if model.weights == "drawn":
        return "random weights, drawn on the device by each engine from config.json alone"
    return f"random weights, seed {model.seed}"


def _relative(path: Path, root: Path) -> str:
    path, root = path.resolve(), root.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
