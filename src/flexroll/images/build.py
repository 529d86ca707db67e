"""`flexroll images`: build each image, test it, and note what it is. What is there and current is left alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flexroll.bench.console import say
from flexroll.errors import FlexrollError
from flexroll.images.here import bill_suffix
from flexroll.images.record import REPORT, ImageRecord, build_inputs, problem, read, record_path, variant_for
from flexroll.images.runtimes import Apptainer, Built, Oci, find_runtime, last_line
from flexroll.images.sbom import bill_of_materials
from flexroll.provenance import device_class, hash_json, image_inputs
from flexroll.provenance import variant as device_variant
from flexroll.schema.load import known_stacks
from flexroll.schema.records import write_json

BASE = "docker.io/library/python:3.12-slim-bookworm"
PYTHON = "/opt/flexroll/env/bin/python"


def build_images(
    root: Path,
    names: Sequence[str] = (),
    runtime: str | None = None,
    variant: str | None = None,
    base: str | None = None,
    force: bool = False,
) -> list[ImageRecord]:
    """Bring the images up to date with the tree.

    Args:
        names: stacks, or "report"; default: all. runtime: default: the first that works here. variant: "cpu" or
            "cuda"; default: what this machine needs. base: image to start from, in place of the Containerfiles' own.
        force: build also what is current.
    Raises:
        FlexrollError: an unknown name, no runtime, a build or a self-test that fails.
    """
    known = [*known_stacks(root), REPORT]
    for name in names:
        if name not in known:
            raise FlexrollError(f"no image '{name}'; known: {', '.join(known)}")
    if variant not in (None, "cpu", "cuda"):
        raise FlexrollError(f"no variant '{variant}'; use cpu or cuda")
    found, version = find_runtime(root, runtime)
    say(f"building with {found} {version}")
    wanted = variant or device_variant(device_class())
    records = []
    for name in names or known:
        if not force and _current(root, found, name, wanted):
            say(f"{name}: the image is current")
            records.append(read(root, found, name))
        else:
            records.append(_build(root, name, variant_for(name, wanted), found, version, base or BASE))
    return records


def _current(root: Path, runtime: str, name: str, wanted: str) -> bool:
    if problem(root, runtime, name, wanted):
        return False
    record = read(root, runtime, name)
    return runtime == "apptainer" or not Oci(runtime, root).lost([record.digest])


def _build(root: Path, name: str, kind: str, runtime: str, version: str, base: str) -> ImageRecord:
    maker = Apptainer(root) if runtime == "apptainer" else Oci(runtime, root)  # type: ignore[arg-type]
    inputs, before = image_inputs(root, name, kind), read(root, runtime, name)
    begun = time.monotonic()
    base_digest = maker.resolve_base(base)
    say(f"{name} ({kind}): building on {base}" + (f" ({base_digest[:19]})" if base_digest else ""))
    built = maker.build(name, kind, base, hash_json(inputs), _wheels())
    build_s = time.monotonic() - begun
    contents = _self_test(maker, built, name, kind, inputs)
    sbom = Path(".images") / "sbom" / f"{name}-{bill_suffix(built.digest)}"
    write_json(root / sbom, bill_of_materials(name, built.digest, contents))
    record = ImageRecord(
        name=name,
        variant=kind,  # type: ignore[arg-type]
        runtime=runtime,  # type: ignore[arg-type]
        runtime_version=version,
        reference=built.reference,
        digest=built.digest,
        inputs=build_inputs(root, runtime, name, kind),
        base=base,
        base_digest=base_digest,
        size_bytes=built.size_bytes,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        build_s=round(build_s, 1),
        python=contents["python"],
        torch=contents["torch"],
        sbom=str(sbom),
    )
    write_json(record_path(root, runtime, name), record.model_dump_json(indent=1) + "\n")
    if before and before.digest != record.digest and isinstance(maker, Oci) and maker.has(before.digest):
        say(f"{name}: the image it replaces is kept; `{runtime} image prune` frees {before.size_bytes / 1e9:.1f} GB")
    say(
        f"{name}: {record.digest[:19]}, {record.size_bytes / 1e9:.1f} GB in {build_s:.0f} s, self-test passed"
        f" (Python {record.python}{f', torch {record.torch}' if record.torch else ''})"
    )
    return record


def _self_test(maker: Oci | Apptainer, built: Built, name: str, kind: str, inputs: dict[str, str]) -> dict:
    done = maker.run(built, [PYTHON, "-P", "-m", "flexroll.images.selftest", name, kind, json.dumps(inputs)])
    if done.returncode:
        number = -done.returncode if done.returncode < 0 else done.returncode - 128  # a runtime passes signals on so
        stopped = number in set(signal.Signals)
        why = f"stopped by {signal.Signals(number).name}" if stopped else last_line(done.stderr)
        raise FlexrollError(f"the image of {name} fails its self-test: {why}")
    return json.loads(done.stdout.splitlines()[-1])


def _wheels() -> Path | None:
    """The host's cache of wheels, which set-up has filled; the locks' hashes are checked all the same."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        return None
    done = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True)
    folder = Path(done.stdout.strip())
    return folder if done.returncode == 0 and folder.is_dir() else None
