"""What `make images` notes of each image: .images/<runtime>/<name>.json, outside git, for builds differ by machine.

What is committed pins the inputs. The record is also what stands for the image in the workflow's `container:`; a SIF
lies beside its record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from flexroll.bench.checkpoint import sha256_file
from flexroll.errors import FlexrollError
from flexroll.provenance import differing, image_inputs
from flexroll.schema.base import Strict

REPORT = "report"  # the image without torch, for the table and the document
Runtime = Literal["apptainer", "podman", "docker"]
RUNTIMES: tuple[Runtime, ...] = ("apptainer", "podman", "docker")
DEFINITION = "image.def"


class ImageRecord(Strict):
    """One image as it was built here.

    digest: podman's and docker's image id, under which it is run; of a SIF the file's sha256. inputs: sha256 of each
    file under containers/ that it was made from. sbom: file of the root, CycloneDX JSON.
    """

    name: str
    variant: Literal["cpu", "cuda", "any"]
    runtime: Runtime
    runtime_version: str
    reference: str = Field(description="What the runtime calls it; of a SIF its file, from the root.")
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    inputs: dict[str, str]
    base: str
    base_digest: str | None = Field(None, description="What the base's tag stood for when this image was built.")
    size_bytes: int
    created: str
    build_s: float
    python: str
    torch: str | None = None
    sbom: str


def candidates(wanted: str | None) -> tuple[Runtime, ...]:
    """The runtimes to consider, best first: the one that is wanted, or all. Raises FlexrollError: there is no such."""
    if wanted is not None and wanted not in RUNTIMES:
        raise FlexrollError(f"no container runtime '{wanted}'; known: {', '.join(RUNTIMES)}")
    return RUNTIMES if wanted is None else (wanted,)  # type: ignore[return-value]


def file_digest(path: Path) -> str:
    """A file's sha256 in the form of an image's digest."""
    return f"sha256:{sha256_file(path)}"


def record_path(root: Path, runtime: str, name: str) -> Path:
    return root / ".images" / runtime / f"{name}.json"


def read(root: Path, runtime: str, name: str) -> ImageRecord | None:
    """The record of an image; None where there is none, or half of one."""
    try:
        return ImageRecord.model_validate_json(record_path(root, runtime, name).read_text())
    except (OSError, ValidationError):
        return None


def variant_for(name: str, device_variant: str) -> str:
    """The variant that an image must have on this kind of machine, "cpu" or "cuda"."""
    return "any" if name == REPORT else device_variant


def build_inputs(root: Path, runtime: str, name: str, kind: str) -> dict[str, str]:
    """As `image_inputs`, with what only this runtime's build reads."""
    inputs = image_inputs(root, name, kind)
    definition = root / "containers" / DEFINITION
    if runtime == "apptainer" and definition.exists():
        inputs[DEFINITION] = sha256_file(definition)
    return inputs


def problem(root: Path, runtime: str, name: str, device_variant: str) -> str | None:
    """Why the recorded image cannot serve this tree on this kind of machine; None if it can.

    Reads files alone: whether podman or docker still holds the image is theirs to say (`runtimes.Oci.lost`).
    """
    found = read(root, runtime, name)
    if found is None:
        return f"no image of {name} for {runtime}"
    wanted = variant_for(name, device_variant)
    if found.variant != wanted:
        return f"the image of {name} is the {found.variant} variant and this machine needs {wanted}"
    changed = differing(found.inputs, build_inputs(root, runtime, name, wanted))
    if changed:
        return f"the image of {name} was made from another containers/{changed[0]}"
    if runtime != "apptainer":
        return None
    try:
        sif = (root / found.reference).stat()
        # A SIF is gigabytes: it is read only where it was written after its record, as a copied tree's may be.
        newer = sif.st_mtime_ns > record_path(root, runtime, name).stat().st_mtime_ns
        same = sif.st_size == found.size_bytes and not (newer and file_digest(root / found.reference) != found.digest)
    except OSError:
        return f"{found.reference} is gone"
    return None if same else f"{found.reference} is not the file that was recorded"


def container(root: Path, runtime: str, name: str) -> Path:
    """What the workflow's `container:` names: a SIF, or the record, which the look-alike reads."""
    path = record_path(root, runtime, name)
    return path.with_suffix(".sif") if runtime == "apptainer" else path
