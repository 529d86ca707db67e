"""Runs inside an image, from the mounted tree: is it what it should be? Prints what is in it, as JSON, for the SBOM.

Exit code 1 and one line a problem where something is wrong.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from flexroll.images.here import image_file
from flexroll.provenance import differing

# What a build must not leave behind.
LEFTOVERS = ("/run/secrets/ca.crt", "/root/.cache", "/var/cache/uv/*", "/inputs/*", "/etc/pip.conf", "/root/.netrc")


def contents() -> dict[str, Any]:
    """{python, torch, packages: [{name, version, license}], debian: [{name, version, arch}]}."""
    packages = [
        {"name": d.metadata["Name"], "version": d.version, "license": d.metadata.get("License-Expression")}
        for d in importlib.metadata.distributions()
    ]
    versions = {p["name"].lower(): p["version"] for p in packages}
    return {
        "python": platform.python_version(),
        "torch": versions.get("torch"),
        "packages": sorted(packages, key=lambda p: p["name"].lower()),
        "debian": debian_packages(),
    }


def debian_packages() -> list[dict[str, str]]:
    if not shutil.which("dpkg-query"):
        return []
    shown = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\n"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [dict(zip(("name", "version", "arch"), row.split("\t"), strict=True)) for row in shown.stdout.splitlines()]


def problems(name: str, variant: str, inputs: dict[str, str]) -> list[str]:
    """What is wrong with this image as the one of that name, made from those inputs; [] if nothing is."""
    found = []
    data = image_file()
    if data is None:
        return ["there is no /etc/flexroll-image.json"]
    if (data["stack"], data["variant"]) != (name, variant):
        found.append(f"it says it is {data['stack']} ({data['variant']})")
    found += [f"it was made from another containers/{file}" for file in differing(data["inputs"], inputs)]
    if os.path.commonpath([sys.prefix, "/opt/flexroll"]) != "/opt/flexroll":
        found.append(f"its Python is {sys.prefix}")
    for pattern in LEFTOVERS:
        root = Path("/")
        found += [f"the build left {path}" for path in sorted(root.glob(pattern[1:]))[:1]]
    return found + (report_problems() if name == "report" else stack_problems())


def report_problems() -> list[str]:
    try:
        import flexroll.report.render  # noqa: F401  the image exists to import it
    except ImportError as error:
        return [f"the report's modules cannot be imported: {error}"]
    return ["torch is in it"] if importlib.util.find_spec("torch") else []


def stack_problems() -> list[str]:
    """torch computes, what torch.compile builds here gives the same, and the engines' own libraries load."""
    import torch

    def double(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.arange(8.0)
    if not torch.equal(double(x) / 2, x.sin()):
        return ["torch computes wrong results"]
    try:
        compiled = torch.compile(double)(x)
    except Exception as error:
        return [f"torch.compile fails: {str(error).splitlines()[0][:200]}"]
    if not torch.allclose(compiled, double(x)):
        return ["torch.compile computes wrong results"]
    return library_problems()


def extensions() -> list[str]:
    """The modules that load the packages' compiled code.

    vLLM's CPU build of 0.26 has one for each instruction set, and this CPU would stop at another's first instruction
    (SIGILL); its `vllm._C` is the one for AVX-512 with bfloat16.
    """
    import torch

    found = [name for name in ("bitsandbytes",) if importlib.util.find_spec(name)]
    if importlib.util.find_spec("vllm"):
        own = f"vllm._C_{torch.backends.cpu.get_cpu_capability()}"
        found.append(own if importlib.util.find_spec(own) else "vllm._C")
    return found


def library_problems() -> list[str]:
    """Compiled extensions that miss a system library: vLLM only warns of it, and fails when it starts."""
    found = []
    for extension in extensions():
        try:
            importlib.import_module(extension)
        except ImportError as error:
            # libcuda comes from the host's driver; an extension under another name than its own has loaded by then.
            if not any(text in str(error) for text in ("libcuda", "does not define module export function")):
                found.append(f"{extension} does not load: {error}")
    return found


def main(name: str, variant: str, inputs: str) -> int:
    wrong = problems(name, variant, json.loads(inputs))
    for line in wrong:
        print(line, file=sys.stderr)
    print(json.dumps(contents()))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
