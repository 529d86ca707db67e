"""Checkpoints and prompts: what is accepted, and the one line said about what is not."""

from __future__ import annotations

import hashlib
import http.server
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from flexroll.bench.checkpoint import check_checkpoint, fingerprint, hash_files, safetensors_header
from flexroll.bench.model import prepare_model
from flexroll.bench.prompts import longest_prompt, needed_prompts, prepare_prompts
from flexroll.errors import FlexrollError
from flexroll.provenance import SRC
from flexroll.schema import architecture
from flexroll.schema.load import parse_config

TINY = Path(__file__).parents[1] / "models" / "tiny-gsm"


def make_config(model=None, prompts=None, **changes):
    data = {
        "run": "t",
        "model": {"name": "m", "path": "model"} | (model or {}),
        "prompts": {"path": "q.json", "field": "q", "count": 2} | (prompts or {}),
        "drift": {"stacks": ["s"]},
        "max_model_len": 128,
        "experiments": {
            "e": {
                "title": "E",
                "section": "grpo",
                "batches": [2],
                "new_tokens": 16,
                "stacks": ["s"],
                "backends": [{"backend": "flex"}],
            }
        },
    }
    return parse_config(data | changes)


@pytest.fixture
def tiny(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path


# Checkpoints


def test_a_whole_checkpoint_is_described(tiny):
    prepare_model(make_config(), tiny / "model.json", tiny)
    data = json.loads((tiny / "model.json").read_text())
    assert data["path"] == "model" and data["source"] == "local" and data["revision"] is None
    weights = (tiny / "model" / "model.safetensors").read_bytes()
    assert data["files"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()


def test_the_fingerprint_follows_what_a_model_computes_with(tiny):
    files = hash_files(tiny / "model")
    assert fingerprint(files | {"gsm_test.json": "0"}) == fingerprint(files)
    assert fingerprint(files | {"model.safetensors": "0"}) != fingerprint(files)


@pytest.mark.parametrize("size", [0, 5, 100, 1_000_000])
def test_cut_weights_are_seen(tiny, size):
    path = tiny / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FlexrollError, match=r"model\.safetensors: .*fetch it again") as caught:
        check_checkpoint(tiny / "model")
    assert "\n" not in str(caught.value)


def test_damaged_headers_and_overlong_files_are_seen(tiny):
    path = tiny / "model" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    with pytest.raises(FlexrollError, match="was cut or damaged"):
        check_checkpoint(tiny / "model")
    path.write_bytes(data[:8] + b"\xff" * 50 + data[58:])
    with pytest.raises(FlexrollError, match="header is damaged"):
        check_checkpoint(tiny / "model")


def test_missing_parts_are_named(tiny):
    with pytest.raises(FlexrollError, match="no such checkpoint folder"):
        check_checkpoint(tiny / "elsewhere")
    (tiny / "model" / "config.json").write_text('{"model_type": ')
    with pytest.raises(FlexrollError, match=r"config\.json: not valid JSON"):
        check_checkpoint(tiny / "model")
    (tiny / "model" / "config.json").write_text("{}")
    with pytest.raises(FlexrollError, match="no model_type"):
        check_checkpoint(tiny / "model")
    (tiny / "model" / "config.json").unlink()
    with pytest.raises(FlexrollError, match=r"config\.json: missing"):
        check_checkpoint(tiny / "model")


def write_safetensors(path: Path, names: list[str]) -> None:
    header = {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4 * len(names))


def test_shards_must_hold_what_the_index_promises(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    write_safetensors(tmp_path / "1.safetensors", ["a"])
    with pytest.raises(FlexrollError, match=r"2\.safetensors: missing"):
        check_checkpoint(tmp_path)
    write_safetensors(tmp_path / "2.safetensors", ["c"])
    with pytest.raises(FlexrollError, match="lacks tensor b which"):
        check_checkpoint(tmp_path)
    write_safetensors(tmp_path / "2.safetensors", ["b"])
    check_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(FlexrollError, match="not a valid index"):
        check_checkpoint(tmp_path)


def test_random_weights_repeat_and_load(tiny, monkeypatch):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from flexroll.bench import random_model

    config = make_config(model={"name": "r", "source": "random", "path": "model", "dtype": "float32"})
    prepare_model(config, tiny / "model.json", tiny)
    first = json.loads((tiny / "model.json").read_text())["files"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny / "models" / "r")
    names = set(safetensors_header(tiny / "models" / "r" / "model.safetensors"))
    assert names == {n for n in loaded.state_dict() if n != "lm_head.weight"}  # tied
    weight = loaded.model.layers[3].mlp.up_proj.weight
    assert 0.0195 < weight.std().item() < 0.0205 and (loaded.model.norm.weight == 1).all()

    monkeypatch.setattr(random_model, "SHARD_BYTES", 4_000_000)
    shutil.rmtree(tiny / "models")
    prepare_model(config, tiny / "model.json", tiny)
    shards = json.loads((tiny / "model.json").read_text())["files"]
    assert sum(n.endswith(".safetensors") for n in shards) > 2 and first["config.json"] == shards["config.json"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tiny / "models" / "r")
    assert (again.model.layers[3].mlp.up_proj.weight == weight).all()


def test_random_weights_refuse_what_they_cannot_do(tiny):
    pytest.importorskip("torch")
    config = make_config(model={"name": "r", "source": "random", "path": "model"})
    (tiny / "models").mkdir()
    shutil.copytree(tiny / "model", tiny / "models" / "r")
    with pytest.raises(FlexrollError, match=r"holds another checkpoint; give model\.name another name"):
        prepare_model(config, tiny / "model.json", tiny)
    (tiny / "model" / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(FlexrollError, match=r"model_type .mamba. is not known"):
        prepare_model(make_config(model={"name": "n", "source": "random", "path": "model"}), tiny / "o.json", tiny)


def test_drawn_weights_write_nothing_and_say_so(tiny):
    (tiny / "model" / "model.safetensors").write_bytes(b"not even read")
    model = {"name": "r", "source": "random", "path": "model", "weights": "drawn"}
    prepare_model(make_config(model=model, drift={"stacks": []}), tiny / "model.json", tiny)
    data = json.loads((tiny / "model.json").read_text())
    assert data["path"] == "model" and data["weights"] == "drawn" and "drawn on the device" in data["source"]
    assert "config.json" in data["files"] and "tokenizer.json" in data["files"]
    assert not any(name.endswith(".safetensors") for name in data["files"]) and not (tiny / "models").exists()
    model["path"] = "model/config.json"
    prepare_model(make_config(model=model, drift={"stacks": []}), tiny / "model.json", tiny)
    assert json.loads((tiny / "model.json").read_text()) == data


def test_tensors_of_a_config_are_those_of_its_checkpoint(tiny):
    config = json.loads((TINY / "config.json").read_text())
    stored = {name: tuple(entry["shape"]) for name, entry in safetensors_header(TINY / "model.safetensors").items()}
    wanted = dict(architecture.tensors(config))
    assert wanted == {name: shape for name, shape in stored.items() if name != "lm_head.weight"}
    assert architecture.parameters(config) == sum(math.prod(shape) for shape in wanted.values())
    shape = json.loads((TINY.parent / "qwen3-4b-shape" / "config.json").read_text())
    assert architecture.parameters(shape) == 4_022_468_096  # Qwen3-4B's own count
    assert architecture.kv_token_bytes(shape, "bfloat16") == 147_456


# Prompts


def run_prompts(root, **prompts):
    (root / "model.json").write_text(json.dumps({"path": "model", "files": {}}))
    prepare_prompts(make_config(prompts=prompts), root / "model.json", root / "out.json", root)
    return json.loads((root / "out.json").read_text())


def write_rows(root, rows, name="q.json"):
    text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(r) + "\n" for r in rows)
    (root / name).write_text(text)


@pytest.fixture
def with_tokenizer(tiny):
    pytest.importorskip("tokenizers")
    return tiny


def test_prompts_are_rendered_and_repeat(with_tokenizer):
    write_rows(with_tokenizer, [{"q": "Two and two?"}, {"q": "Three and three?"}])
    data = run_prompts(with_tokenizer)
    assert data["prompts"][0]["text"] == "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n"
    assert data["prompts"][0]["ids"][0] == 1 and len(data["prompts"]) == 2
    assert run_prompts(with_tokenizer)["sha256"] == data["sha256"]
    text = run_prompts(with_tokenizer, format="text")
    assert text["prompts"][0]["text"] == "Two and two?" and text["sha256"] != data["sha256"]


def test_prompts_equal_those_of_transformers(with_tokenizer):
    transformers = pytest.importorskip("transformers")
    write_rows(with_tokenizer, [{"q": "Two and two?"}, {"q": "Three?\n  Four?"}])
    tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer / "model")
    for row, prompt in zip(["Two and two?", "Three?\n  Four?"], run_prompts(with_tokenizer)["prompts"], strict=True):
        messages = [{"role": "user", "content": row}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt["text"] == text and prompt["ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_messages_jsonl_and_parquet(with_tokenizer):
    messages = [[{"role": "system", "content": "Sum."}, {"role": "user", "content": f"{i}?"}] for i in range(3)]
    write_rows(with_tokenizer, [{"p": m} for m in messages], "q.jsonl")
    data = run_prompts(with_tokenizer, path="q.jsonl", field="p")
    assert data["prompts"][1]["text"].startswith("<|im_start|>system\nSum.<|im_end|>\n<|im_start|>user\n1?")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"p": messages}), with_tokenizer / "q.parquet")
    assert run_prompts(with_tokenizer, path="q.parquet", field="p")["sha256"] == data["sha256"]
    with pytest.raises(FlexrollError, match="no column 'q'; it has p"):
        run_prompts(with_tokenizer, path="q.parquet")
    whole = (with_tokenizer / "q.parquet").read_bytes()
    (with_tokenizer / "q.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FlexrollError, match="not a readable parquet file"):
        run_prompts(with_tokenizer, path="q.parquet", field="p")


def test_long_prompts_are_left_out_and_counted_repeats_taken_once(with_tokenizer):
    write_rows(with_tokenizer, [{"q": t} for t in ("a", "many words " * 100, "a", "b", "c")])
    data = run_prompts(with_tokenizer)
    assert data["left_out"] == 1 and data["duplicates"] == 1 and [len(data["prompts"])] == [2]
    with pytest.raises(FlexrollError, match=r"3 usable prompts \(1 longer than .*, 1 repeated\), the run needs 4"):
        run_prompts(with_tokenizer, count=4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"q": "a"}, {"q": " \n"}], "prompt 1 is empty"),
        ([{"q": "a"}, {"q": None}], "prompt 1 is empty"),
        ([{"q": []}], "prompt 0 is empty"),
        ([{"q": [{"role": "user", "content": ""}]}], "prompt 0 is empty"),
        ([{"q": 3}], "prompt 0 is neither text nor a list of messages"),
        ([{"p": "a"}], "row 0 has no 'q' but p; set prompts.field"),
        ({"q": "a"}, "expected a JSON list"),
    ],
)
def test_bad_rows_are_named(with_tokenizer, rows, message):
    write_rows(with_tokenizer, rows)
    with pytest.raises(FlexrollError, match=message):
        run_prompts(with_tokenizer)


def test_bad_prompt_files_are_named(with_tokenizer):
    with pytest.raises(FlexrollError, match="no such prompts file"):
        run_prompts(with_tokenizer)
    (with_tokenizer / "q.json").write_text('[{"q": "a"')
    with pytest.raises(FlexrollError, match="not valid JSON"):
        run_prompts(with_tokenizer)
    with pytest.raises(FlexrollError, match=r"sha256 is .* mend the config"):
        run_prompts(with_tokenizer, sha256="0" * 64)
    (with_tokenizer / "model" / "chat_template.jinja").write_text("{% for m in %}")
    with pytest.raises(FlexrollError, match="chat template is not valid"):
        run_prompts(with_tokenizer)
    (with_tokenizer / "model" / "chat_template.jinja").unlink()
    with pytest.raises(FlexrollError, match=r"no chat template there; use plain text \(prompts\.format: text"):
        run_prompts(with_tokenizer)
    (with_tokenizer / "model" / "tokenizer.json").unlink()
    with pytest.raises(FlexrollError, match=r"tokenizer\.json: missing"):
        run_prompts(with_tokenizer)


def test_random_prompts_need_no_tokenizer(tiny):
    (tiny / "model" / "tokenizer.json").unlink()
    data = run_prompts(tiny, source="random", lengths=[5, 9], count=40, seed=3)
    lengths = {len(p["ids"]) for p in data["prompts"]}
    assert (
        lengths == {5, 6, 7, 8, 9}
        and data["sha256"] == run_prompts(tiny, source="random", lengths=[5, 9], count=40, seed=3)["sha256"]
    )
    assert all(128 <= i < 1920 for p in data["prompts"] for i in p["ids"])
    with pytest.raises(FlexrollError, match="200 is too long, 112 tokens fit"):
        run_prompts(tiny, source="random", lengths=[5, 200])


def test_prompts_needed_and_their_room_follow_each_experiment():
    base = {"title": "E", "section": "group", "stacks": ["s"], "backends": [{"backend": "flex"}]}
    several = {
        "a": base | {"batches": [8], "samples": 4, "sampling": "hot", "new_tokens": 100},
        "b": base | {"batches": [2], "new_tokens": {"min": 4, "max": 150}, "max_model_len": 200},
    }
    config = make_config(experiments=several, samplings={"greedy": {}, "hot": {"temperature": 1}})
    assert needed_prompts(config) == 2 and longest_prompt(config) == 28
    several["a"]["warmup_prompts"] = 5
    assert needed_prompts(make_config(experiments=several, samplings={"greedy": {}, "hot": {"temperature": 1}})) == 5


# The hub: a local server that answers as it does, and a fresh process that is pointed at it


REVISION = "a" * 40
FETCH = """
import sys
from pathlib import Path
from flexroll.errors import FlexrollError
from flexroll.bench.hub import fetch_dataset_file, fetch_model
root, what, sha256 = Path(sys.argv[1]), sys.argv[2], sys.argv[3] or None
try:
    if what == "model":
        fetch_model("o/n", "a" * 40, root / "fetched", print)
    else:
        print(fetch_dataset_file("o/d", "a" * 40, what, root / "data", sha256, print))
except FlexrollError as error:
    sys.exit(f"said: {error}")
"""


class Hub(http.server.BaseHTTPRequestHandler):
    files: ClassVar[dict[str, bytes]] = {}
    served: ClassVar[dict[str, bytes]] = {}  # what is sent in a file's place
    fetched: ClassVar[list[str]] = []

    def do_GET(self):
        self.answer(True)

    def do_HEAD(self):
        self.answer(False)

    def answer(self, with_body):
        path = self.path.split("?")[0]
        if f"/tree/{REVISION}" in path:  # newer clients list a repository so
            entries = []
            for name in self.files:
                known = self.sibling(name)
                entry = {"type": "file", "path": name, "size": known["size"], "oid": known["blobId"]}
                if "lfs" in known:
                    entry["lfs"] = known["lfs"] | {"oid": known["lfs"]["sha256"]}
                entries.append(entry)
            return self.send(200, json.dumps(entries).encode(), with_body, {"Content-Type": "application/json"})
        if path.startswith("/api/models/"):
            data = {"id": "o/n", "modelId": "o/n", "sha": REVISION, "siblings": list(map(self.sibling, self.files))}
            return self.send(200, json.dumps(data).encode(), with_body, {"Content-Type": "application/json"})
        name = path.split(f"/resolve/{REVISION}/")[-1]
        if name not in self.files:
            return self.send(404, b"", with_body, {"X-Error-Code": "EntryNotFound"})
        if with_body:
            self.fetched.append(name)
        etag = hashlib.sha256(self.files[name]).hexdigest()
        body = self.served.get(name, self.files[name])
        return self.send(200, body, with_body, {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION})

    def sibling(self, name):
        data = self.files[name]
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        entry = {"rfilename": name, "size": len(data), "blobId": blob}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def send(self, status, body, with_body, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    pytest.importorskip("huggingface_hub")
    files = {p.name: p.read_bytes() for p in TINY.iterdir()} | {"README.md": b"no", "data/q.json": b'[{"q": "a"}]'}
    handler = type("Handler", (Hub,), {"files": files, "served": {}, "fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.url = f"http://127.0.0.1:{server.server_port}"

    def fetch(what="model", sha256=""):
        env = dict(os.environ, HF_ENDPOINT=handler.url, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_XET="1")
        env |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": str(SRC), "no_proxy": "*"}
        command = [sys.executable, "-c", FETCH, str(tmp_path), what, sha256]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    yield handler, fetch
    server.shutdown()


def test_a_hub_model_is_fetched_checked_and_not_fetched_twice(hub, tmp_path):
    handler, fetch = hub
    done = fetch()
    assert done.returncode == 0, done.stderr
    check_checkpoint(tmp_path / "fetched")
    weights = tmp_path / "fetched" / "model.safetensors"
    assert weights.read_bytes() == handler.files[weights.name] and "README.md" not in handler.fetched
    handler.fetched.clear()
    assert "match" in fetch().stdout and handler.fetched == []


def test_a_hub_file_with_another_hash_is_refused(hub, tmp_path):
    handler, fetch = hub
    good = handler.files["model.safetensors"]
    handler.served["model.safetensors"] = good[:-1] + bytes([good[-1] ^ 1])
    done = fetch()
    assert done.returncode == 1 and "said: " in done.stderr and "hash differs" in done.stderr, done.stderr


def test_a_dataset_file_is_checked_against_the_config(hub):
    handler, fetch = hub
    sha256 = hashlib.sha256(handler.files["data/q.json"]).hexdigest()
    done = fetch("data/q.json", sha256)
    assert done.returncode == 0, done.stderr
    done = fetch("data/q.json", "0" * 64)
    assert done.returncode == 1 and "mend the config" in done.stderr


def test_an_unreachable_hub_is_one_line(hub):
    handler, fetch = hub
    handler.url = "http://127.0.0.1:9"
    done = fetch()
    assert done.returncode == 1 and "cannot fetch o/n from the hub" in done.stderr and "source: local" in done.stderr
