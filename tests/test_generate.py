"""`flexroll generate` and the tokenizer: what is read, what is written, and the one line said about what is wrong."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import flexroll
import flexroll.engine
from engine_models import reference_greedy
from flexroll import Tokenizer, cli
from flexroll.errors import FlexrollError
from flexroll.generate import read_prompts


@dataclass
class Completion:
    index: int
    sample: int
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None
    raw_logprobs: list[float] | None


class FakeEngine:
    """Continues every prompt with its own last tokens and the sample's number; remembers how it was asked."""

    made: Any = None

    @classmethod
    def from_pretrained(cls, model: Path, **options: Any) -> FakeEngine:
        cls.made = cls()
        cls.made.model, cls.made.options = model, options
        return cls.made

    def generate(self, prompts: Any, params: Any, progress: Any = None) -> list[Completion]:
        self.prompts, self.params = prompts, params
        done = []
        for index, prompt in enumerate(prompts):
            for sample in range(params.n):
                tokens = [*prompt[-3:], 100 + sample]
                scores = [-0.5] * len(tokens) if params.logprobs else None
                done.append(Completion(index, sample, tokens, "length", scores, scores))
        for completion in reversed(done):  # as they end, in any order
            if progress is not None:
                progress(completion)
        return done


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr(flexroll.engine, "Engine", FakeEngine, raising=False)
    monkeypatch.setattr(FakeEngine, "made", None)
    return FakeEngine


def run(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: object) -> tuple[int, list[dict], str]:
    monkeypatch.setattr(sys, "argv", ["flexroll", "generate", *map(str, arguments)])
    monkeypatch.delenv("FLEXROLL_DEBUG", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    return caught.value.code, [json.loads(line) for line in captured.out.splitlines()], captured.err


# The tokenizer


def test_tokenizer_round_trips_and_chats_as_transformers(tiny_gsm: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours, theirs = Tokenizer(tiny_gsm), transformers.AutoTokenizer.from_pretrained(tiny_gsm)
    text = "Two and two?\n  Three!"
    assert ours.encode(text) == theirs(text)["input_ids"] and ours.decode(ours.encode(text)) == text
    messages = [{"role": "system", "content": "Sum."}, {"role": "user", "content": text}]
    for prompt, asked in ((text, messages[1:]), (messages, messages)):
        rendered = theirs.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        assert ours.render(prompt) == rendered
        assert ours.chat(prompt) == theirs(rendered, add_special_tokens=False)["input_ids"]
    assert "<|im_start|>" not in ours.decode(ours.chat(text))
    assert ours.decode(ours.chat(text), special=True) == ours.render(text)


def test_tokenizer_errors_are_one_line(tiny_gsm: Path, tmp_path: Path) -> None:
    with pytest.raises(FlexrollError, match=r"tokenizer\.json: missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FlexrollError, match="cannot be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tiny_gsm / "tokenizer.json").read_bytes())
    bare = Tokenizer(tmp_path)
    assert bare.encode("a")
    with pytest.raises(FlexrollError, match=r"no chat template there; .*--raw"):
        bare.chat("a")


def test_the_package_offers_the_tokenizer_by_name() -> None:
    assert flexroll.Tokenizer is Tokenizer and set(flexroll.__all__) >= {"Engine", "SamplingParams", "Tokenizer"}
    with pytest.raises(AttributeError, match="no attribute 'Tokeniser'"):
        flexroll.Tokeniser  # noqa: B018


# Prompts


def test_prompts_come_from_everywhere_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "d"}]
    rows = ['"b"', '{"prompt": "c", "id": 7}', "", json.dumps({"messages": messages}), json.dumps(messages)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin\n"))
    assert read_prompts(["a", "-"], tmp_path / "p.jsonl") == ["a", "from\nstdin", "b", "c", messages, messages]
    (tmp_path / "p.txt").write_text("one\n two \n")
    assert read_prompts([], tmp_path / "p.txt") == ["one", " two "]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "a\n\nb\n", r"p\.txt:2: an empty prompt"),
        ("p.txt", "", r"p\.txt: no prompt in it"),
        ("p.jsonl", "\n \n", r"p\.jsonl: no prompt in it"),
        ("p.jsonl", '"a"\n{"prompt": ', r"p\.jsonl:2: not valid JSON"),
        ("p.jsonl", '"a"\n\n{"q": "b"}', r"p\.jsonl:3: neither 'prompt' nor 'messages' in it but q"),
        ("p.jsonl", '{"prompt": " "}', r"p\.jsonl:1: an empty prompt"),
        ("p.jsonl", "[]", r"p\.jsonl:1: an empty prompt"),
        ("p.jsonl", "3", r"p\.jsonl:1: neither text nor a list of messages"),
        ("p.jsonl", '{"messages": [{"role": "user"}]}', r"p\.jsonl:1: neither text nor a list of messages"),
        ("p.txt", b"\xff\xfe\x00", r"cannot be read as text"),
    ],
)
def test_bad_prompt_files_are_named_with_their_line(tmp_path: Path, name: str, content: Any, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FlexrollError, match=message) as caught:
        read_prompts([], tmp_path / name)
    assert "\n" not in str(caught.value)


# The command


def test_completions_are_one_object_a_line(engine, tiny_gsm: Path, monkeypatch, capsys) -> None:
    arguments = (tiny_gsm, "Two?", "Three?", "--n", 2, "--temperature", 0.7, "--max-new-tokens", 9, "--seed", 5)
    code, rows, errors = run(monkeypatch, capsys, *arguments, "--dtype", "float32", "--device", "cpu", "--eager")
    assert code == 0, errors
    assert [(row["index"], row["sample"], row["prompt"]) for row in rows] == [
        (0, 0, "Two?"),
        (0, 1, "Two?"),
        (1, 0, "Three?"),
        (1, 1, "Three?"),
    ]
    tokenizer = Tokenizer(tiny_gsm)
    assert engine.made.prompts == [tokenizer.chat("Two?"), tokenizer.chat("Three?")]
    assert rows[1]["token_ids"] == [*engine.made.prompts[0][-3:], 101]
    assert rows[1]["text"] == tokenizer.decode(rows[1]["token_ids"]) and rows[1]["finish_reason"] == "length"
    assert set(rows[0]) == {"index", "sample", "prompt", "text", "token_ids", "finish_reason"}
    params, options = engine.made.params, engine.made.options
    assert (params.n, params.max_new_tokens, params.temperature, params.seed) == (2, 9, 0.7, 5)
    assert options["max_batch"] == 4 and options["max_model_len"] == max(map(len, engine.made.prompts)) + 9
    assert options["dtype"] == torch.float32 and not options["compiled"] and not options["cuda_graphs"]


def test_raw_prompts_logprobs_and_sizes(engine, tiny_gsm: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "new" / "out.jsonl"
    sizes = ("--max-batch", 3, "--max-model-len", 64, "--kv-tokens", 128, "--adapter", "a", "--top-k", 4)
    arguments = (tiny_gsm, "Two?", "--raw", "--logprobs", "--out", out, *sizes)
    code, rows, errors = run(monkeypatch, capsys, *arguments)
    assert code == 0 and rows == [], errors
    (row,) = map(json.loads, out.read_text().splitlines())
    assert engine.made.prompts == [Tokenizer(tiny_gsm).encode("Two?")]
    assert row["logprobs"] == row["raw_logprobs"] == [-0.5] * len(row["token_ids"])
    options = engine.made.options
    assert (options["max_batch"], options["max_model_len"], options["kv_tokens"]) == (3, 64, 128)
    assert options["adapter"] == Path("a") and engine.made.params.top_k == 4
    written = out.read_text()
    code, _, errors = run(monkeypatch, capsys, *arguments)
    assert code == 2 and "exists already; --force" in errors and out.read_text() == written
    assert run(monkeypatch, capsys, *arguments, "--force")[0] == 0


def test_the_bar_counts_completions_on_a_terminal(engine, tiny_gsm: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stderr", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    terminal = sys.stderr
    code, rows, _ = run(monkeypatch, capsys, tiny_gsm, "Two?", "Three?", "--n", 3, "--temperature", 1)
    assert code == 0 and len(rows) == 6
    assert "6/6" in terminal.getvalue() and "6 completions, 24 tokens" in terminal.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL"], "no prompt; give one or more, --file FILE, or - for stdin"),
        (["MODEL", "a", " "], "prompt 2 is empty"),
        (["MODEL", "a", "--file", "none.txt"], "none.txt: no such prompts file"),
        (["none", "a"], "none: not a checkpoint folder"),
        (["MODEL", "a", "--n", "2"], "greedy samples are all alike; give --temperature"),
        (["MODEL", "a", "--n", "0"], "Invalid value"),
        (["MODEL", "a", "--temperature", "-1"], "temperature must be 0 (greedy) or more"),
        (["MODEL", "a", "--top-p", "2"], "top_p must lie in (0, 1]"),
        (["MODEL", "a", "--out", "."], "a folder; name a file"),
        (["MODEL", "a", "--dtype", "int8"], "Invalid value"),
        (["MODEL", "--raw", "--file", "chat.jsonl"], "prompt 1 is a list of messages, which --raw cannot render"),
        ([], "Missing argument"),
    ],
)
def test_errors_are_one_line(engine, tiny_gsm, tmp_path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text('[{"role": "user", "content": "a"}]')
    code, rows, errors = run(monkeypatch, capsys, *[tiny_gsm if a == "MODEL" else a for a in arguments])
    assert code == 2 and rows == [] and errors.count("\n") == 1 and message in errors, errors
    assert engine.made is None  # nothing was loaded


def test_the_engine_itself(tiny_gsm: Path, monkeypatch, capsys) -> None:
    """The same tokens as transformers', from text to text."""
    pytest.importorskip("transformers")
    options = ("--max-new-tokens", 8, "--dtype", "float32", "--device", "cpu", "--eager", "--ignore-eos", "--logprobs")
    code, rows, errors = run(monkeypatch, capsys, tiny_gsm, "Two and two?", "Three?", *options)
    assert code == 0, errors
    prompts = [Tokenizer(tiny_gsm).chat(text) for text in ("Two and two?", "Three?")]
    assert [row["token_ids"] for row in rows] == reference_greedy(tiny_gsm, prompts, 8)
    assert all(len(row["logprobs"]) == 8 and max(row["logprobs"]) <= 0 for row in rows)
