"""Podman, Docker and Apptainer: which of them works here, and how each builds and runs an image of this project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flexroll.errors import FlexrollError
from flexroll.images.record import REPORT, RUNTIMES, Runtime, candidates, container, file_digest

CA = Path("/etc/ssl/certs/ca-certificates.crt")
LOOK_ALIKE = Path("workflow") / "bin"
# How podman and docker say that they do not hold an image; a damaged one's "layer not known" is something else.
UNKNOWN = ("image not known", "no such image")


@dataclass(frozen=True)
class Built:
    """A built image: what the runtime calls it, its digest, its size in bytes."""

    reference: str
    digest: str
    size_bytes: int


def find_runtime(root: Path, wanted: str | None) -> tuple[Runtime, str]:
    """(runtime, version): the wanted one, or the first that works here.

    Raises:
        FlexrollError: it does not work, or none does; why, in one line.
    """
    reasons = []
    for runtime in candidates(wanted):
        version, reason = _probe(root, runtime)
        if version:
            return runtime, version
        reasons.append(reason)
    hint = "" if wanted else "; or go without containers: `--workflow-profile profiles/native`"
    raise FlexrollError(f"{'; '.join(reasons)}; install one of {', '.join(RUNTIMES)}{hint}")


def _probe(root: Path, runtime: str) -> tuple[str | None, str]:
    """(version, "") or (None, why it does not work)."""
    if runtime == "apptainer":
        path = os.pathsep.join(p for p in os.get_exec_path() if Path(p).resolve() != (root / LOOK_ALIKE).resolve())
        program = shutil.which("apptainer", path=path)
        command = [program or "apptainer", "--version"]
    else:
        program = shutil.which(runtime)
        command = [runtime, "version", "--format", "{{.Server.Version}}" if runtime == "docker" else "{{.Version}}"]
    if program is None:
        return None, f"{runtime} is not installed"
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None, f"{runtime} does not work here ({last_line(done.stderr)})"
    return done.stdout.split()[-1], ""


def last_line(text: str) -> str:
    """The last line of a program's output that says something, shortened; not that some other program failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not re.search(r"exit status \d+$", line)] or lines
    return (lines[-1] if lines else "no message")[:300]


class Oci:
    """Podman or Docker."""

    def __init__(self, runtime: Runtime, root: Path) -> None:
        self.runtime, self.root = runtime, root

    def resolve_base(self, base: str) -> str | None:
        """What the base's tag stands for now: its digest, fetched if it is not here; None for one without a digest."""
        if not self.has(base):
            self._run(["pull", base], f"fetching the base image {base}")
        digests = json.loads(self._inspect(base, "{{json .RepoDigests}}") or "[]") or []
        named = [d for d in digests if not d.startswith("localhost/")]
        return named[0].partition("@")[2] if named else self._inspect(base, "{{.Id}}")

    def has(self, reference: str) -> bool:
        """Whether the runtime holds an image of that name or id."""
        return self._inspect(reference, "{{.Id}}") is not None

    def lost(self, digests: list[str]) -> list[str]:
        """Those of the digests that the runtime no longer holds; where it holds all, that takes one call.

        Raises:
            FlexrollError: it is not installed, or says something else than that it does not know an image.
        """
        if shutil.which(self.runtime) is None:
            raise FlexrollError(f"{self.runtime} is not installed")
        if self._ask("{{.Id}}", *digests).returncode == 0:
            return []
        return [digest for digest in digests if self._unknown(digest)]

    def _unknown(self, digest: str) -> bool:
        done = self._ask("{{.Id}}", digest)
        if done.returncode and not any(words in done.stderr.lower() for words in UNKNOWN):
            raise FlexrollError(f"{self.runtime} does not work here ({last_line(done.stderr)})")
        return done.returncode != 0

    def build(self, name: str, variant: str, base: str, inputs: str, wheels: Path | None) -> Built:
        reference = f"localhost/flexroll/{name}:{variant}"
        with tempfile.TemporaryDirectory() as folder:
            line = ["build", "--file", f"containers/{name}/Containerfile", "--tag", reference]
            line += ["--iidfile", f"{folder}/id", "--build-arg", f"BASE={base}"]
            line += ["--build-arg", f"INPUTS={inputs}"]
            line += [] if name == REPORT else ["--build-arg", f"STACK={name}", "--build-arg", f"VARIANT={variant}"]
            line += ["--secret", f"id=ca,src={CA}"] if CA.exists() else []
            if self.runtime == "podman":
                line += ["--format", "oci", *(["--volume", f"{wheels}:/var/cache/uv"] if wheels else [])]
            self._run([*line, "containers"], f"building the image of {name}")
            digest = Path(folder, "id").read_text().strip()
        digest = digest if digest.startswith("sha256:") else f"sha256:{digest}"
        return Built(reference, digest, int(self._inspect(digest, "{{.Size}}") or 0))

    def run(self, built: Built, command: list[str]) -> subprocess.CompletedProcess:
        """Run without network or privileges, the tree read-only; as another user than the builder."""
        line = [
            self.runtime,
            "run",
            "--rm",
            "--network=none",
            "--user",
            "65534:65534",
            "--security-opt",
            "label=disable",
        ]
        line += ["-v", f"{self.root / 'src'}:/flexroll/src:ro", "-e", "HOME=/tmp", "-e", "FLEXROLL_ROOT=/flexroll"]
        line += ["-e", "PYTHONPATH=/flexroll/src", "-e", "PYTHONDONTWRITEBYTECODE=1", built.digest, *command]
        return subprocess.run(line, capture_output=True, text=True)

    def _inspect(self, reference: str, template: str) -> str | None:
        done = self._ask(template, reference)
        return None if done.returncode else done.stdout.strip()

    def _ask(self, template: str, *references: str) -> subprocess.CompletedProcess:
        line = [self.runtime, "image", "inspect", "--format", template, *references]
        return subprocess.run(line, capture_output=True, text=True)

    def _run(self, arguments: list[str], what: str) -> None:
        # Docker before 23 builds without secrets unless told.
        run_shown([self.runtime, *arguments], self.root, what, {"DOCKER_BUILDKIT": "1"})


class Apptainer:
    """A SIF from containers/image.def, which runs what the Containerfiles run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def resolve_base(self, base: str) -> str | None:
        """Apptainer tells no digest of a tag; of a file, its hash."""
        kind, source = self._source(base)
        return file_digest(Path(source)) if kind != "docker" and Path(source).is_file() else None

    def build(self, name: str, variant: str, base: str, inputs: str, wheels: Path | None) -> Built:
        target = container(self.root, "apptainer", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part.sif")
        kind, source = self._source(base)
        values = {"NAME": name, "VARIANT": variant, "BOOTSTRAP": kind, "BASE": source, "CA": CA if CA.exists() else ""}
        line = ["apptainer", "--nocolor", "build", "--force", *(["--fakeroot"] if _limited_root() else [])]
        # gzip, the default, makes the report's image 4 % smaller and its build three times as long.
        line += ["--mksquashfs-args", "-comp zstd -Xcompression-level 3"]
        line += [part for key, value in values.items() for part in ("--build-arg", f"{key}={value}")]
        line += ["--bind", f"{wheels}:/var/cache/uv"] if wheels else []
        inside = {f"APPTAINERENV_{n}": value for n, value in os.environ.items() if n.lower().endswith("_proxy")}
        try:
            run_shown([*line, str(part), "containers/image.def"], self.root, f"building the image of {name}", inside)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return Built(str(target.relative_to(self.root)), file_digest(target), target.stat().st_size)

    @staticmethod
    def _source(base: str) -> tuple[str, str]:
        """(Bootstrap:, From:) of a definition file: an archive, a SIF or sandbox folder, else a registry's image."""
        kind, _, archive = base.partition(":")
        if kind in ("docker-archive", "oci-archive"):
            return kind, str(Path(archive).absolute())
        return ("localimage", str(Path(base).absolute())) if Path(base).exists() else ("docker", base)

    def run(self, built: Built, command: list[str]) -> subprocess.CompletedProcess:
        line = ["apptainer", "exec", "--cleanenv", "--containall", "--no-home"]
        line += ["--bind", f"{self.root / 'src'}:/flexroll/src:ro", "--env", "FLEXROLL_ROOT=/flexroll"]
        line += ["--env", "PYTHONPATH=/flexroll/src", "--env", "PYTHONDONTWRITEBYTECODE=1"]
        return subprocess.run([*line, str(self.root / built.reference), *command], capture_output=True, text=True)


def _limited_root() -> bool:
    """Whether this is root without all capabilities, as in most containers: Apptainer's builds as root want them all.

    With --fakeroot they run in a user namespace, which has them; for other users that is what a build does anyway.
    """
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.geteuid() == 0 and held != 2 ** (int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1) - 1


def run_shown(line: list[str], root: Path, what: str, variables: dict[str, str] | None = None) -> None:
    """Run with its output shown. Raises FlexrollError with its last words if it fails."""
    tail: list[str] = []
    env = os.environ | (variables or {})
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(line, cwd=root, env=env, text=True, **pipe) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(f"    {text.rstrip()}", flush=True)
            tail = [*tail[-40:], text]
    if process.returncode < 0:
        raise FlexrollError(f"{what} was stopped (signal {-process.returncode}); run `make images` again to go on")
    if process.returncode:
        full = any("no space left on device" in text.lower() for text in tail)
        why = "no space left on the device; make room" if full else last_line("".join(tail))
        raise FlexrollError(f"{what} failed: {why}; then run `make images` again")
