"""Where a result comes from: hashes of code, locks and cells, and the state of the working tree. Imports no torch.

What makes a cell stale is what `cell_key` hashes: the cell itself, its stack's lock (and Containerfile), the code its
backend runs, the class of device and, at run time, the model, prompts and adapter. Nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from flexroll.bench.device import visible_gpus
from flexroll.errors import FlexrollError
from flexroll.schema.cells import Cell, Job

PACKAGE = "flexroll"
GIT = "FLEXROLL_GIT"  # COMMIT or COMMIT+dirty
SRC = Path(__file__).resolve().parents[1]


def find_root() -> Path:
    """The project's tree: FLEXROLL_ROOT, else the first of the working folder, its parents and this file's tree that
    holds containers/."""
    given = os.environ.get("FLEXROLL_ROOT")
    if given:
        return Path(given).resolve()
    here = Path.cwd()
    for folder in (here, *here.parents, SRC.parent):
        if (folder / "containers").is_dir() and (folder / "src" / PACKAGE).is_dir():
            return folder
    raise FlexrollError("no flexroll tree here; change to the folder that holds containers/ and src/flexroll")


def source_hash(*roots: str, src: Path | None = None) -> str:
    """Hash of the code that the modules `roots` run: they and every flexroll module they import, at any depth.

    Function-level imports count, imports under `if TYPE_CHECKING` do not; a module named only in a string is not
    followed. Comments, docstrings and layout do not change the hash, nor does the Python version that computes it. A
    data file counts where a module that reads it says so: `DATA_FILES = ("name",)`, files beside the module.

    Args:
        src: folder that holds the package; default: the running one.
    Returns: 64 hex digits.
    Raises:
        FlexrollError: a root is no module of the package, or a file is not valid Python.
    """
    return _hash_modules(imported_modules(*roots, src=src))


def module_hash(*modules: str, src: Path | None = None) -> str:
    """Hash of the code of these modules alone: for a step whose output is hashed again by those who read it."""
    found = {name: _module_file(name, src or SRC) for name in modules}
    for name, path in found.items():
        if path is None:
            raise FlexrollError(f"no module {name} under {src or SRC}; its source cannot be hashed")
    return _hash_modules(found)  # type: ignore[arg-type]


def _hash_modules(modules: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for module, path in sorted(modules.items()):
        code, _, data = _parsed(path)
        digest.update(f"{module}\0{code}\0".encode())
        for name in data:
            try:
                digest.update(hashlib.sha256((path.parent / name).read_bytes()).digest())
            except OSError:
                raise FlexrollError(f"{path.parent / name}: missing, and {module} reads it; restore it") from None
    return digest.hexdigest()


def imported_modules(*roots: str, src: Path | None = None) -> dict[str, Path]:
    """{module name: file} of the roots and all they import, parent packages included."""
    src = src or SRC
    found: dict[str, Path] = {}
    todo = list(roots)
    for root in roots:
        if _module_file(root, src) is None:
            raise FlexrollError(f"no module {root} under {src}; its source cannot be hashed")
    while todo:
        name = todo.pop()
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):  # importing a.b.c runs a, a.b and a.b.c
            module = ".".join(parts[:depth])
            path = _module_file(module, src)
            if path is None or module in found:
                continue
            found[module] = path
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            todo += [_absolute(target, package) for target in _parsed(path)[1]]
    return found


def backend_source_hash(backend: str, src: Path | None = None) -> str:
    """Hash of the code that measures a cell of this backend."""
    roots = (f"{PACKAGE}.backends.{backend}", f"{PACKAGE}.bench.worker", f"{PACKAGE}.bench.isolate")
    return source_hash(*roots, src=src)


def device_class() -> str:
    """The class of machine a result belongs to: the GPU's name, or "cpu"."""
    gpus = visible_gpus()
    return gpus[0]["name"] if gpus else "cpu"


def variant(device: str) -> str:
    """Either "cpu" or "cuda": torch's name for this device class, and that of the stack's lock which serves it."""
    return "cpu" if device == "cpu" else "cuda"


def image_inputs(root: Path, name: str, kind: str) -> dict[str, str]:
    """{file under containers/: sha256} of what an image is made from, which is what a native environment is, too.

    Args:
        name: a stack, or "report". kind: "cpu", "cuda" or, of the report's image, "any".
    """
    folder = root / "containers"
    if not (folder / name / f"{kind}.lock").exists():
        raise FlexrollError(f"stack '{name}' has no {kind}.lock under {folder / name}; write it with `make lock`")
    files = (f"{name}/{kind}.lock", f"{name}/Containerfile", "install.sh")
    return {f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in files if (folder / f).exists()}


def differing(made_from: dict[str, str], tree: dict[str, str]) -> list[str]:
    """Names of input files that are not the same in both."""
    return sorted(name for name in made_from.keys() | tree.keys() if made_from.get(name) != tree.get(name))


def lock_hash(root: Path, stack: str, device: str) -> str:
    """Hash of what the stack's environment is made from on this device class: lock and Containerfile."""
    return hash_json(image_inputs(root, stack, variant(device)))


def cell_key(root: Path, cell: Cell, device: str, inputs: dict[str, str] | None = None) -> str:
    """Everything that makes a cell's record stale, as one hash.

    Args:
        inputs: hashes of model, prompts and adapter, known at run time only.
    """
    return hash_json(
        {
            "cell": cell.model_dump(mode="json"),
            **_shared(root, cell.stack, cell.backend, device),
            "inputs": inputs or {},
        }
    )


def job_key(root: Path, job: Job, device: str) -> str:
    """Hash over everything that makes a cell of the job stale, for the rule that runs it; the order of cells does not
    matter."""
    cells = sorted(hash_json(cell.model_dump(mode="json")) for cell in job.cells)
    return hash_json({"cells": cells, **_shared(root, job.stack, job.backend, device)})


def _shared(root: Path, stack: str, backend: str, device: str) -> dict[str, str]:
    """What the cells of one stack and backend have in common."""
    return {
        "lock": lock_hash(root, stack, device),
        "source": backend_source_hash(backend, _src_of(root)),
        "device": device,
    }


def hash_json(value: Any) -> str:
    """sha256 of a JSON value in its canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """(commit, dirty) of the working tree; (None, None) where git cannot tell. Untracked files are not dirt.

    Images hold no git: there it is what the workflow found outside, in FLEXROLL_GIT.
    """
    commit, _, dirt = os.environ.get(GIT, "").partition("+")
    if commit:
        return commit, dirt == "dirty"
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no", "--", "src", "containers"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def _src_of(root: Path) -> Path:
    return root / "src" if (root / "src" / PACKAGE).is_dir() else SRC


def _module_file(module: str, src: Path) -> Path | None:
    base = src.joinpath(*module.split("."))
    for path in (base / "__init__.py", base.with_name(base.name + ".py")):
        if path.is_file():
            return path
    return None


def _absolute(target: tuple[int, str], package: str) -> str:
    """`(level, name)` of an import statement inside `package` as an absolute module name."""
    level, name = target
    if level == 0:
        return name
    parts = package.split(".")
    return ".".join(parts[: len(parts) - level + 1] + ([name] if name else []))


def _parsed(path: Path) -> tuple[str, tuple[tuple[int, str], ...], tuple[str, ...]]:
    stat = path.stat()
    return _parse_file(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1024)
def _parse_file(path: Path, mtime_ns: int, size: int) -> tuple[str, tuple[tuple[int, str], ...], tuple[str, ...]]:
    """(hash of the code, import targets, names of data files) of a file; cached until the file changes."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise FlexrollError(f"{path}:{error.lineno}: not valid Python ({error.msg})") from None
    _drop_docstrings(tree)
    return hashlib.sha256(_canonical(tree).encode()).hexdigest(), tuple(_imports(tree)), _data_files(tree)


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                del node.body[0]


def _canonical(node: Any) -> str:
    """The tree as text, without positions and empty fields (ast.dump's form changes between Python versions)."""
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_canonical(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return "[" + ",".join(_canonical(item) for item in node) + "]"
    return repr(node)


def _data_files(tree: ast.Module) -> tuple[str, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "DATA_FILES" for t in node.targets):
            return tuple(ast.literal_eval(node.value))
    return ()


def _imports(tree: ast.AST) -> list[tuple[int, str]]:
    targets: list[tuple[int, str]] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for node in child.orelse:
                targets += _imports(node)
        elif isinstance(child, ast.Import):
            targets += [(0, alias.name) for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            targets.append((child.level, module))
            targets += [(child.level, f"{module}.{alias.name}".strip(".")) for alias in child.names]
        else:
            targets += _imports(child)
    return targets
