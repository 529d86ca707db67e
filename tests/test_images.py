"""Images without building one: records, refusals, what a failed build leaves, the bill of materials."""

from __future__ import annotations

import json
import re
import stat
from itertools import compress, product
from pathlib import Path

import pytest

from container_tree import snakemake, write_config
from flexroll import provenance
from flexroll.errors import FlexrollError
from flexroll.images import build, deploy, here, record, runtimes, selftest
from flexroll.images.sbom import bill_of_materials
from flexroll.schema.load import known_stacks, load_config
from tree_copy import copy_tree

CONTENTS = {
    "python": "3.12.1",
    "torch": "2.11.0",
    "packages": [
        {"name": "Torch", "version": "2.11.0", "license": "BSD-3-Clause"},
        {"name": "odd_name", "version": "1", "license": "a licence of its own"},
        {"name": "odd-name", "version": "1", "license": None},
    ],
    "debian": [{"name": "libc6", "version": "2.36-9+deb12u14", "arch": "amd64"}],
}
# A podman whose build prints BUILD's lines and ends as CODE says, and whose self-test prints TEST. It holds all images
# but those of GONE, or fails with FAULT's words where asked for one; its calls are noted in a file beside it.
PODMAN = """#!/bin/sh
echo "$*" >> "$0.calls"
case $1 in
  version) echo 5.0 ;;
  image)
    [ -z "${FAULT:-}" ] || { printf '%s\\n' "$FAULT" >&2; exit 125; }
    for word in ${GONE:-}; do
      case $* in *$word*) echo "Error: inspecting object: $word: image not known" >&2; lost=125 ;; esac
    done
    [ -z "${lost:-}" ] || exit $lost
    case "$*" in *Size*) echo 7 ;; *Repo*) echo '[]' ;; *) echo sha256:base ;; esac ;;
  pull) echo "pulling"; exit "${PULL:-0}" ;;
  build)
    while [ "$1" != --iidfile ]; do shift; done
    [ "${CODE:-0}" = kill ] && kill -KILL $$
    printf '%s\\n' "${BUILD:-built}"
    [ "${CODE:-0}" = 0 ] || exit "$CODE"
    printf sha256:%064d "${ID:-1}" > "$2" ;;
  run) printf '%s\\n' "$TEST"; [ -z "${WRONG:-}" ] || { echo "$WRONG" >&2; exit 1; }
    [ -z "${STOPPED:-}" ] || exit $((128 + STOPPED)) ;;
esac
"""


@pytest.fixture
def tree(tmp_path, root, monkeypatch):
    """A tree with two stacks' inputs, and a podman that builds nothing."""
    tree = tmp_path / "tree"
    for name in ("torch2.11", "torch2.9.1", "report"):
        folder = tree / "containers" / name
        folder.mkdir(parents=True)
        kinds = ("any",) if name == "report" else ("cpu", "cuda")
        for kind in kinds:
            (folder / f"{kind}.lock").write_text(f"{name} {kind}\n")
        (folder / "Containerfile").write_text("FROM x\n")
        if name != "report":
            (folder / "requirements.in").touch()
    (tree / "containers/install.sh").write_text("true\n")
    program = tmp_path / "bin" / "podman"
    program.parent.mkdir()
    program.write_text(PODMAN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("TEST", json.dumps(CONTENTS))
    return tree


def make(tree, *names, **options):
    return build.build_images(tree, names or ("torch2.11",), "podman", "cpu", "localhost/base", **options)


def records(tree):
    return sorted(path.relative_to(tree / ".images").as_posix() for path in (tree / ".images").rglob("*.json"))


def test_a_build_is_recorded_with_its_digest_and_bill(tree):
    [made] = make(tree)
    assert made == record.read(tree, "podman", "torch2.11")
    assert made.digest == f"sha256:{1:064d}" and (made.torch, made.variant) == ("2.11.0", "cpu")
    assert (tree / made.sbom).exists()
    assert record.problem(tree, "podman", "torch2.11", "cpu") is None
    assert record.container(tree, "podman", "torch2.11") == tree / ".images/podman/torch2.11.json"


def test_what_is_current_is_left_alone(tree, monkeypatch):
    make(tree)
    monkeypatch.setenv("CODE", "9")  # would fail
    assert make(tree)[0].digest == f"sha256:{1:064d}"
    with pytest.raises(FlexrollError):
        make(tree, force=True)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {"CODE": "125", "BUILD": "Error: write /x: no space left on device"},
            "no space left on the device; make room",
        ),
        ({"CODE": "125", "BUILD": "one\nError: hash mismatch for torch"}, "failed: Error: hash mismatch for torch"),
        ({"CODE": "kill"}, r"was stopped \(signal 9\); run `make images` again"),
        ({"WRONG": "torch.compile fails: no g\\+\\+"}, r"fails its self-test: torch.compile fails"),
        ({"STOPPED": "4"}, "fails its self-test: stopped by SIGILL$"),
    ],
)
def test_a_build_that_fails_leaves_the_old_record_and_one_line(tree, monkeypatch, env, words):
    before = make(tree)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FlexrollError, match=words):
        make(tree, force=True)
    assert [record.read(tree, "podman", "torch2.11")] == before
    with pytest.raises(FlexrollError):
        make(tree, "torch2.9.1")
    assert "podman/torch2.9.1.json" not in records(tree)


def test_an_interrupted_pull_of_the_base_is_one_line(tree, monkeypatch):
    monkeypatch.setenv("FAULT", "Error: localhost/base: image not known")
    monkeypatch.setenv("PULL", "130")
    with pytest.raises(FlexrollError, match="fetching the base image localhost/base failed: pulling"):
        make(tree)
    assert records(tree) == []


def test_half_a_record_is_none(tree):
    make(tree)
    path = record.record_path(tree, "podman", "torch2.11")
    path.write_text(path.read_text()[:100])
    assert record.read(tree, "podman", "torch2.11") is None
    assert record.problem(tree, "podman", "torch2.11", "cpu") == "no image of torch2.11 for podman"


@pytest.mark.parametrize("file", ["torch2.11/cpu.lock", "torch2.11/Containerfile", "install.sh"])
def test_an_image_of_other_inputs_is_refused(tree, file):
    make(tree)
    (tree / "containers" / file).write_text("changed\n")
    assert record.problem(tree, "podman", "torch2.11", "cpu").endswith(f"was made from another containers/{file}")
    with pytest.raises(FlexrollError, match="make images"):
        deploy.choose_runtime(tree, ["torch2.11"], "cpu", None)


def test_a_definition_file_makes_apptainers_images_alone_stale(tree):
    (tree / "containers/image.def").write_text("Bootstrap: docker\n")
    kinds = [record.build_inputs(tree, runtime, "torch2.11", "cpu") for runtime in record.RUNTIMES]
    assert ["image.def" in inputs for inputs in kinds] == [True, False, False]


def test_an_image_for_another_kind_of_machine_is_refused(tree):
    make(tree, "torch2.11", "report")
    assert "is the cpu variant and this machine needs cuda" in record.problem(tree, "podman", "torch2.11", "cuda")
    assert record.problem(tree, "podman", "report", "cuda") is None


def test_the_runtime_is_the_first_that_has_every_image(tree):
    make(tree, "torch2.11")
    with pytest.raises(FlexrollError, match=r"no image of report for podman: run `make images`"):
        deploy.choose_runtime(tree, ["torch2.11", "report"], "cpu", None)
    make(tree, "report")
    assert deploy.choose_runtime(tree, ["torch2.11", "report"], "cpu", None) == "podman"
    with pytest.raises(FlexrollError, match="no container images here for docker"):
        deploy.choose_runtime(tree, ["torch2.11"], "cpu", "docker")
    with pytest.raises(FlexrollError, match="no container runtime 'lxc'"):
        deploy.choose_runtime(tree, ["torch2.11"], "cpu", "lxc")


# Images that the runtime, not the tree, is asked for.

IMAGES = ["torch2.11", "torch2.9.1", "report"]


@pytest.fixture
def built(tree, monkeypatch):
    """The tree with all its images on podman, {name: digest}: each another's."""
    for number, name in enumerate(IMAGES, 1):
        monkeypatch.setenv("ID", str(number))
        make(tree, name)
    return {name: record.read(tree, "podman", name).digest for name in IMAGES}


def asked(runtime="podman"):
    """How often the runtime was asked for images since the last time."""
    calls = Path(f"{runtimes.shutil.which(runtime)}.calls")
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return sum(line.startswith("image inspect --format {{.Id}}") for line in lines)


@pytest.mark.parametrize("mask", product([False, True], repeat=3))
def test_images_that_were_removed_are_named_and_built_anew(tree, built, monkeypatch, mask, capfd):
    """Of any set of images: the message names those, and `make images` builds those and no other."""
    gone = list(compress(IMAGES, mask))
    monkeypatch.setenv("GONE", " ".join(built[name] for name in gone))
    monkeypatch.setenv("ID", "9")
    asked()
    if gone:
        words = f"podman has lost the image{'s' * (len(gone) > 1)} of {', '.join(gone)}: run `make images`, or "
        with pytest.raises(FlexrollError, match=f"^{re.escape(words)}"):
            deploy.choose_runtime(tree, IMAGES, "cpu", None)
    else:
        assert deploy.choose_runtime(tree, IMAGES, "cpu", None) == "podman" and asked() == 1
    for name in IMAGES:  # what a run does not need may be gone
        if name not in gone:
            assert deploy.choose_runtime(tree, [name], "cpu", "podman") == "podman"
    capfd.readouterr()
    digests = {made.name: made.digest for made in make(tree, *IMAGES)}
    assert digests == built | dict.fromkeys(gone, f"sha256:{9:064d}")
    assert deploy.choose_runtime(tree, IMAGES, "cpu", None) == "podman"
    assert "the image it replaces is kept" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("Error: database is locked\nError: exit status 1", "Error: database is locked"),
        ("Error: inspecting object: layer not known", "Error: inspecting object: layer not known"),
        ("", "no message"),
    ],
)
def test_a_runtime_that_fails_has_lost_nothing(tree, built, monkeypatch, fault, words):
    """Its own words are told, and nothing is built anew for them."""
    monkeypatch.setenv("FAULT", fault or " ")
    told = rf"^podman does not work here \({words}\)"
    with pytest.raises(FlexrollError, match=f"{told}: run `make images`"):
        deploy.choose_runtime(tree, IMAGES, "cpu", "podman")
    with pytest.raises(FlexrollError, match=f"{told}$"):
        make(tree)


def test_a_runtime_that_is_no_longer_installed_is_named(tree, built, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    for wanted in (None, "podman"):
        with pytest.raises(FlexrollError, match=r"^podman is not installed: run `make images`"):
            deploy.choose_runtime(tree, IMAGES, "cpu", wanted)


def test_a_runtime_is_asked_only_where_its_records_would_do(tree, built):
    asked()
    assert deploy.choose_runtime(tree, IMAGES, "cpu", None, ask=False) == "podman"
    (tree / "containers/install.sh").write_text("changed\n")
    with pytest.raises(FlexrollError, match=r"made from another containers/install\.sh"):
        deploy.choose_runtime(tree, IMAGES, "cpu", None)
    assert asked() == 0


def test_the_next_runtime_serves_where_one_has_lost_an_image(tree, built, monkeypatch):
    docker = Path(runtimes.shutil.which("podman")).with_name("docker")
    docker.write_text(PODMAN)
    docker.chmod(0o755)
    monkeypatch.setenv("ID", "9")
    build.build_images(tree, IMAGES, "docker", "cpu", "localhost/base")
    asked("docker")
    assert deploy.choose_runtime(tree, IMAGES, "cpu", None) == "podman" and asked("docker") == 0
    monkeypatch.setenv("GONE", built["report"])
    assert deploy.choose_runtime(tree, IMAGES, "cpu", None) == "docker"


def test_a_workflow_names_what_was_removed_before_any_job(tree, root, tmp_path, monkeypatch):
    """In one line; a process of Snakemake's own for a job asks for none."""
    pytest.importorskip("snakemake")
    whole = copy_tree(root, tmp_path / "whole", "models/tiny-gsm")
    config = write_config(whole, "removed", ["torch2.11"])
    build.build_images(whole, ("torch2.11",), "podman")
    monkeypatch.setenv("ID", "2")
    [report] = build.build_images(whole, ("report",), "podman")
    monkeypatch.setenv("GONE", report.digest)
    asked()
    code, output = snakemake(whole, "podman", config, "--dry-run", "--mode", "subprocess", "--nolock")
    assert code == 0 and asked() == 0, output
    code, output = snakemake(whole, "podman", config)
    assert code != 0 and not (whole / "work").exists() and "Traceback" not in output
    [line] = [line for line in output.splitlines() if "make images" in line]
    assert "podman has lost the image of report: run `make images`" in line


def test_no_runtime_is_one_line(tree, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    words = "apptainer is not installed; podman is not installed; docker is not installed; install one of"
    with pytest.raises(FlexrollError, match=words):
        build.build_images(tree, ())
    with pytest.raises(FlexrollError, match=r"no image 'torch9'; known: torch2\.11, torch2\.9\.1, report"):
        build.build_images(tree, ("torch9",))
    with pytest.raises(FlexrollError, match="no variant 'rocm'"):
        build.build_images(tree, (), variant="rocm")


# Inside an image.


@pytest.fixture
def inside(tree, monkeypatch, tmp_path):
    """A function that puts this process into an image of the tree's inputs, changed as its arguments say."""

    def enter(**changes):
        inputs = provenance.image_inputs(tree, "torch2.11", "cpu")
        (tmp_path / "image.json").write_text(
            json.dumps({"stack": "torch2.11", "variant": "cpu", "inputs": inputs} | changes)
        )
        monkeypatch.setattr(here, "IMAGE_FILE", tmp_path / "image.json")

    monkeypatch.setattr(here, "IMAGE_FILE", tmp_path / "none.json")
    return enter


def test_a_rule_that_ran_on_the_host_is_found_out(tree, inside, monkeypatch):
    here.check(tree, "torch2.11", "cpu")
    monkeypatch.setenv(here.DEPLOYMENT, "container")
    for refused in (lambda: here.check(tree, "torch2.11", "cpu"), here.check_any):
        with pytest.raises(FlexrollError, match=r"runs in containers, but this process .* runs in none"):
            refused()
    inside()
    here.check(tree, "torch2.11", "cpu")
    here.check_any()


def test_the_wrong_image_is_refused(tree, inside):
    inside()
    with pytest.raises(FlexrollError, match=r"this is the image of torch2\.11, the command needs that of torch2\.9\.1"):
        here.check(tree, "torch2.9.1", "cpu")
    with pytest.raises(FlexrollError, match=r"the cpu image of torch2\.11 and the machine needs cuda"):
        here.check(tree, "torch2.11", "cuda")
    inside(inputs={"torch2.11/cpu.lock": "other"})
    with pytest.raises(FlexrollError, match="was made from another containers/"):
        here.check(tree, "torch2.11", "cpu")


def test_the_digest_comes_from_whoever_started_the_container(tree, inside, monkeypatch):
    monkeypatch.setenv(here.DIGEST, "sha256:1")
    assert here.digest() == here.NATIVE  # a variable alone makes no container
    inside()
    assert here.digest() == "sha256:1"
    monkeypatch.delenv(here.DIGEST)
    assert here.digest() == "unrecorded image of torch2.11"
    make(tree)
    monkeypatch.setenv("APPTAINER_CONTAINER", str(tree / ".images/podman/torch2.11.sif"))
    assert here.digest() == f"sha256:{1:064d}"
    assert here.bill_of_materials(tree) == tree / record.read(tree, "podman", "torch2.11").sbom


def test_the_self_test_finds_what_a_build_must_not_leave(inside, tree, tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "stack_problems", list)
    inputs = provenance.image_inputs(tree, "torch2.11", "cpu")
    assert selftest.problems("torch2.11", "cpu", inputs) == ["there is no /etc/flexroll-image.json"]
    inside()
    monkeypatch.setattr(selftest.sys, "prefix", "/opt/flexroll/env")
    monkeypatch.setattr(selftest, "LEFTOVERS", (f"{tmp_path}/left/*",))
    assert selftest.problems("torch2.11", "cpu", inputs) == []
    (tmp_path / "left").mkdir()
    (tmp_path / "left/ca.crt").touch()
    found = selftest.problems("torch2.11", "cuda", inputs | {"install.sh": "other"})
    assert len(found) == 3 and f"the build left {tmp_path}/left/ca.crt" in found


# What the workflow hands on.


def test_only_what_is_asked_for_passes(root, monkeypatch):
    for name, value in {"HF_TOKEN": "secret", "PYTHONPATH": "/mine", "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    env = deploy.environment(root, "apptainer")
    assert env["APPTAINERENV_OMP_NUM_THREADS"] == "3" and "PATH" not in env
    assert not {"APPTAINERENV_HF_TOKEN", "APPTAINERENV_PYTHONPATH"} & env.keys()
    monkeypatch.setenv("FLEXROLL_PASS", "HF_TOKEN, OTHER")
    assert deploy.environment(root, "podman")["APPTAINERENV_HF_TOKEN"] == "secret"
    assert deploy.environment(root, "podman")["PATH"].startswith(f"{root}/workflow/bin:")


def test_the_commit_is_found_outside(root, monkeypatch):
    env = deploy.environment(root, "podman")
    commit, dirty = provenance.git_state(root)
    if commit is None:
        pytest.skip("no git here")
    monkeypatch.setenv(provenance.GIT, env[f"APPTAINERENV_{provenance.GIT}"])
    assert provenance.git_state(Path("/nonexistent")) == (commit, dirty)


def test_what_lies_outside_the_tree_is_mounted(root, tmp_path, monkeypatch):
    config = load_config(root / "workflow/presets/smoke.yaml")
    (tmp_path / "hub").mkdir()
    (tmp_path / "mine.yaml").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    binds = deploy.binds(root, root, tmp_path / "mine.yaml", config)
    assert f"--bind {root}/src:{root}/src:ro" in binds
    assert f"--bind {tmp_path}/mine.yaml:{tmp_path}/mine.yaml:ro" in binds
    assert f"--bind {tmp_path}/hub:{tmp_path}/hub" in binds
    assert f"--bind {root}:{root}" in deploy.binds(root, tmp_path, tmp_path / "mine.yaml", config)
    assert deploy.split_runtime("--runtime=podman --nv") == ("podman", "--nv")
    assert deploy.split_runtime("--nv") == (None, "--nv")


# The inputs of the tree itself.


def test_every_rule_runs_in_an_image(root):
    for path in (root / "workflow/rules").glob("*.smk"):
        for block in re.split(r"^rule ", path.read_text(), flags=re.M)[1:]:
            assert "    container:\n" in block and "    shell:\n" in block, (path.name, block.split(":")[0])


def test_containerfiles_differ_in_their_stack_alone(root):
    texts = {s: (root / "containers" / s / "Containerfile").read_text().replace(s, "STACK") for s in known_stacks(root)}
    first, *others = texts.values()
    assert others and all(other == first for other in others)


def test_uv_in_images_is_the_pinned_one(root):
    assert (root / "containers/uv.txt").read_text() in (root / "requirements.lock").read_text()


def test_the_bill_of_materials_is_valid(tree):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = bill_of_materials("torch2.11", f"sha256:{1:064d}", CONTENTS)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    data = json.loads(text)
    assert data["metadata"]["component"]["version"] == f"sha256:{1:064d}"
    urls = {component["purl"] for component in data["components"]}
    assert urls == {
        "pkg:pypi/torch@2.11.0",
        "pkg:pypi/odd-name@1",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64",
    }
