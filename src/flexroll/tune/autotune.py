"""`flexroll autotune`: the decode kernel options that Inductor's own autotuning likes best, for a cell to replay.

Inductor times one kernel call at the shape of a decode step and logs every candidate. Only the flex_attention template
is logged, so that it is forced, for tuning and in the options to replay. A failure is a result: the file then holds no
options but the reason, and the cells that want them are skipped with it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flexroll.bench.console import say
from flexroll.bench.isolate import worker_env
from flexroll.bench.lease import device_lease
from flexroll.bench.process import describe_exit, end_group, stop_signals, tail
from flexroll.bench.task import read_input
from flexroll.errors import FlexrollError, one_line
from flexroll.provenance import device_class
from flexroll.schema.cells import Cell, expand
from flexroll.schema.config import Config
from flexroll.schema.records import write_json
from flexroll.tune.inductor_log import Candidate, Shape, decode_candidates, log_file, read_log

Kind = Literal["plain", "tma"]
LOG_VARIABLE = "TORCHINDUCTOR_FLEX_ATTENTION_LOGGING_FILE"
NO_LOG = 3  # exit code of a worker whose torch writes no log
FORCED = {"FORCE_USE_FLEX_ATTENTION": True}


class Autotuned(BaseModel):
    """options: decode_kernel_options to replay, None where there are none, with the reason. candidates: {ms, options}
    of one call, fastest first. shape: of the tuned call (tune.inductor_log.Shape)."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    stack: str
    torch: str
    device: str
    shape: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    candidates: list[dict[str, Any]] = []
    reason: str = ""


def autotune(config: Config, *, stack: str, kind: Kind, work: Path, out: Path, root: Path) -> Autotuned:
    """Tune at the decode shape of the config's largest options-section flex batch, and write what came of it.

    Raises:
        FlexrollError: the config has no such cell on this stack, or model.json is missing. Stopped: on SIGTERM.
    """
    cell = tuned_cell(config, stack, kind)
    model = root / read_input(work / "model.json", "model", ("path", "files"))["path"]
    device = device_class()
    found = Autotuned(kind=kind, stack=stack, torch=_torch_version(), device=device)
    if device == "cpu":
        found.reason = "no GPU: Inductor logs the tuning of flex_attention's Triton kernel, which a CPU has not"
    else:
        try:
            with device_lease(root, device), stop_signals():
                log = out.with_suffix(".log")
                shape, candidates = _tune(
                    cell, kind, model, worker_env(root, stack, device), log, config.limits.start_s
                )
            found = found.model_copy(update=outcome(kind, shape, candidates))
        except FlexrollError as error:
            found.reason = one_line(error)
    write_json(out, found.model_dump_json(indent=1) + "\n")
    say(f"autotune {stack} {kind}: {found.options or found.reason}")
    return found


def tuned_cell(config: Config, stack: str, kind: Kind) -> Cell:
    """The flex cell with the most running sequences: of those that replay this kind in the section options, else of all
    in that section, else of all that replay it."""
    flex = [cell for cell in expand(config, [stack]) if cell.backend == "flex"]
    replaying = [cell for cell in flex if cell.option_values.get("replay") == kind]
    inside = [cell for cell in flex if cell.section == "options"]
    for some in ([cell for cell in replaying if cell in inside], inside, replaying):
        if some:
            return max(some, key=lambda cell: cell.running)
    raise FlexrollError(
        f"autotune: run {config.run} has no flex cell in section options on {stack}; nothing to tune for"
    )


def decode_shape(cell: Cell) -> dict[str, Any]:
    """What the shape of a cell's decode step depends on, the model apart."""
    option = cell.option_values
    return {
        "dtype": cell.dtype,
        "batch": cell.running,
        "max_model_len": cell.max_model_len,
        "page_size": option["page_size"],
        "kv_tokens": option["kv_tokens"],
    }


def outcome(kind: Kind, shape: Shape, candidates: list[Candidate]) -> dict[str, Any]:
    """Fields of Autotuned from the candidates of the decode shape, fastest first."""
    fields: dict[str, Any] = {"shape": asdict(shape), "candidates": [asdict(c) for c in candidates]}
    wanted = [c for c in candidates if bool(c.options.get("USE_TMA")) == (kind == "tma")]
    if wanted:
        return fields | {"options": wanted[0].options | FORCED}
    return fields | {"reason": "torch tuned no kernel with USE_TMA here: tensor descriptors cannot serve this shape"}


def _tune(
    cell: Cell, kind: Kind, model: Path, env: dict[str, str], log: Path, limit_s: float
) -> tuple[Shape, list[Candidate]]:
    """Run the tuning in a process of its own. Raises FlexrollError saying why nothing came of it."""
    with tempfile.TemporaryDirectory(prefix="flexroll-autotune-") as folder:
        place = Path(folder)
        task = {"model": str(model), "use_tma": kind == "tma", "device": "cuda", **decode_shape(cell)}
        (place / "task.json").write_text(json.dumps(task))
        # An empty cache: what is cached is not tuned again, and then not logged.
        env = env | {LOG_VARIABLE: str(place / "log"), "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor")}
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "flexroll.tune.autotune_worker", str(place / "task.json")]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise FlexrollError(f"autotuning took longer than limits.start_s, {limit_s:g} s") from None
            finally:
                end_group(process)
        if code == NO_LOG:
            raise FlexrollError(tail(log)[-1])
        if code:
            raise FlexrollError(f"autotuning {describe_exit(code, log)}")
        return decode_candidates(read_log(log_file(place / "log")), cell.running)


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"none in {os.path.basename(sys.prefix)}"
