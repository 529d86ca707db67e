"""The image this process runs in, as its own file says, and whether a job may run in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from flexroll import provenance
from flexroll.errors import FlexrollError

IMAGE_FILE = Path("/etc/flexroll-image.json")
DEPLOYMENT = "FLEXROLL_DEPLOYMENT"  # "container" where the workflow runs its rules in images
DIGEST = "FLEXROLL_IMAGE"  # set by whoever starts a container
NATIVE = "not containerised"


def image_file() -> dict[str, Any] | None:
    """{stack, variant, inputs} of the image around this process; None outside of one of this project's."""
    try:
        data = json.loads(IMAGE_FILE.read_text())
        return data if isinstance(data, dict) and "stack" in data else None
    except (OSError, ValueError):
        return None


def digest() -> str:
    """The image's digest as records hold it; NATIVE outside of one. Without one that is known, the stack's name."""
    data = image_file()
    if data is None:
        return NATIVE
    given = os.environ.get(DIGEST)
    if given:
        return given
    sif = os.environ.get("APPTAINER_CONTAINER", "")
    try:
        return str(json.loads(Path(sif).with_suffix(".json").read_text())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"unrecorded image of {data['stack']}"


def bill_of_materials(root: Path) -> Path | None:
    """The SBOM of this process's image as `make images` left it; None natively, or without one."""
    value = digest()
    return next((root / ".images" / "sbom").glob(f"*-{bill_suffix(value)}"), None) if ":" in value else None


def bill_suffix(value: str) -> str:
    """How the name of a digest's SBOM ends."""
    return f"{value.removeprefix('sha256:')[:12]}.cdx.json"


def check_any() -> None:
    """Refuse to go on outside of an image where the workflow runs in images.

    Raises:
        FlexrollError: this process runs in none.
    """
    if image_file() is None and os.environ.get(DEPLOYMENT) == "container":
        raise FlexrollError(
            f"this workflow runs in containers, but this process ({sys.executable}) runs in none;"
            " leave them out with `--workflow-profile profiles/native`"
        )


def check(root: Path, name: str, device_variant: str | None = None) -> None:
    """Refuse to go on in the wrong image, or outside of one where the workflow runs in images.

    Args:
        name: the stack, or image, that the command needs. device_variant: "cpu" or "cuda"; default: this machine's,
            which is asked for only inside of an image.
    Raises:
        FlexrollError: another image, another variant than this machine needs, or one made from other inputs than the
            tree's.
    """
    check_any()
    data = image_file()
    if data is None:
        return
    if data["stack"] != name:
        raise FlexrollError(f"this is the image of {data['stack']}, the command needs that of {name}")
    variant = str(data.get("variant"))
    device_variant = device_variant or provenance.variant(provenance.device_class())
    if variant not in ("any", device_variant):
        raise FlexrollError(
            f"this is the {variant} image of {name} and the machine needs {device_variant}; run `make images`"
        )
    changed = provenance.differing(data.get("inputs", {}), provenance.image_inputs(root, name, variant))
    if changed:
        raise FlexrollError(f"this image of {name} was made from another containers/{changed[0]}; run `make images`")
