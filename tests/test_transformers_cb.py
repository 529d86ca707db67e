"""transformers' continuous batching on a small random model in float32: each driver and attention against generate's
greedy tokens, what is kept between calls, and what happens when something breaks.

transformers 4.57 asks for a GPU's memory where there is none; here it is told a number, so that its side is run too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_models import random_checkpoint, reference_greedy
from flexroll.backends import cb_drivers, cb_manager, cb_support, transformers_cb
from flexroll.backends.base import EngineSpec, Generation
from flexroll.backends.cb_compile import CompileWatch, compile_forward
from flexroll.backends.transformers_cb import TransformersCb
from flexroll.bench import worker
from flexroll.errors import FlexrollError
from flexroll.schema.config import Sampling
from flexroll.schema.options import TransformersCbOptions

GREEDY, HOT = Sampling(), Sampling(temperature=2.0)
OLD = transformers_cb.version()[0] == 4
PROMPTS = [[5, 9, 33], [7], [11, 4, 60, 8, 21, 90, 3], [50, 51], list(range(10, 50))]
DRIVERS = ("manager", "persistent", "sync")  # some tests leave out the first: test_backends has them
NEW = 12


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if OLD and not torch.cuda.is_available():
        from transformers.generation.continuous_batching import cache

        monkeypatch.setattr(cache.PagedAttentionMemoryHandler, "get_available_memory", staticmethod(lambda *_: 1 << 40))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    return reference_greedy(model, PROMPTS, NEW)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose end token turns up in the middle of a greedy continuation."""
    folder = random_checkpoint(tmp_path_factory.mktemp("cb"), "qwen3", head_dim=8)
    rows = reference_greedy(folder, PROMPTS, NEW)
    end = next(row[4] for row in rows if row[4] not in row[:4])
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": end}))
    return folder


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., TransformersCb]]:
    """Makes a backend for five sequences; it is closed afterwards."""
    made: list[TransformersCb] = []

    def make(driver: str, running: int = 5, **option: object) -> TransformersCb:
        backend = TransformersCb(spec_of(model, driver=driver, **option))
        backend.prepare(running)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


def spec_of(model: Path, **option: object) -> EngineSpec:
    return EngineSpec(
        model=model,
        adapter_mode="none",
        adapter=None,
        merged=None,
        dtype="float32",
        device="cpu",
        max_batch=5,
        max_model_len=64,
        seed=0,
        option=TransformersCbOptions(**option).model_dump(),
    )


def ask(backend: TransformersCb, sampling: Sampling = GREEDY, seed: int = 0, samples: int = 1) -> list[list[int]]:
    return backend.generate(PROMPTS, sampling, [NEW] * len(PROMPTS), True, seed, samples).tokens


@pytest.mark.parametrize("attention", ["paged|sdpa", "paged|eager"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_greedy_is_that_of_generate(
    driver: str, attention: str, start: Callable[..., TransformersCb], wanted: list[list[int]]
) -> None:
    backend = start(driver, attention=attention, block_size=8)
    assert ask(backend) == wanted
    lengths = [NEW, 1, 5, 9, 2]
    cut = [row[:new] for row, new in zip(wanted, lengths, strict=True)]
    assert backend.generate(PROMPTS, GREEDY, lengths, True, 0).tokens == cut
    order = [3, 0, 4, 1, 2]
    assert backend.generate([PROMPTS[i] for i in order], GREEDY, [lengths[i] for i in order], True, 0).tokens == [
        cut[i] for i in order
    ]
    assert backend.generate(PROMPTS[:2], GREEDY, [3, 4], True, 0, 3).tokens == [wanted[0][:3]] * 3 + [wanted[1][:4]] * 3
    backend.prepare(2)  # three wait for a place
    assert ask(backend) == wanted


@pytest.mark.parametrize("driver", DRIVERS[1:])
def test_an_end_token_ends_only_where_it_may(
    driver: str, start: Callable[..., TransformersCb], wanted: list[list[int]], model: Path
) -> None:
    end = json.loads((model / "config.json").read_text())["eos_token_id"]
    ended = [row[: row.index(end) + 1] if end in row else row for row in wanted]
    assert any(len(row) < NEW for row in ended)
    backend = start(driver)
    for ignore, rows in ((False, ended), (True, wanted), (False, ended)):
        assert backend.generate(PROMPTS, GREEDY, [NEW] * 5, ignore, 0).tokens == rows


def test_prompts_in_pieces_give_the_same_tokens(
    start: Callable[..., TransformersCb], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cb_manager, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(cb_manager, "PREFILL_TOKENS_4", 16)
    for driver in DRIVERS:
        assert ask(start(driver)) == wanted


def test_a_seed_repeats_in_every_driver_and_call(start: Callable[..., TransformersCb]) -> None:
    rows = {}
    for driver in DRIVERS:
        backend = start(driver)
        first, other, again = (ask(backend, HOT, seed) for seed in (1, 2, 1))
        assert first == again != other
        rows[driver] = first
    assert rows["manager"] == rows["persistent"] == rows["sync"]


@pytest.mark.parametrize("driver", DRIVERS[1:])
def test_each_filter_works_and_samples_differ(
    driver: str, start: Callable[..., TransformersCb], wanted: list[list[int]]
) -> None:
    backend = start(driver)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert ask(backend, Sampling(temperature=2.0, **narrow), 3) == wanted
    assert len({tuple(row) for row in ask(backend, HOT, 1, 4)}) == 20


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_pool_is_told(driver: str, start: Callable[..., TransformersCb]) -> None:
    backend = start(driver, block_size=16)
    assert backend.memory()["kv_reserved"] is None
    ask(backend)
    token = 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head_dim, bytes
    five = backend.memory()["kv_reserved"]
    assert 5 * 65 * token <= five <= 2 * 5 * 80 * token
    backend.prepare(3)
    backend.generate(PROMPTS[:3], GREEDY, [2] * 3, True, 0)
    assert backend.memory()["kv_reserved"] < five


def test_persistent_keeps_one_manager_and_one_thread(start: Callable[..., TransformersCb]) -> None:
    before = set(threading.enumerate())
    backend = start("persistent")
    ask(backend)
    manager, mine = backend.driver.manager, set(threading.enumerate()) - before
    assert len(mine) == 1
    ask(backend, seed=5)
    assert backend.driver.manager is manager and set(threading.enumerate()) - before == mine
    ask(backend, HOT)
    assert backend.driver.manager is not manager
    backend.prepare(5)
    assert backend.driver.manager is not None
    backend.prepare(4)
    assert not set(threading.enumerate()) - before
    ask(backend)
    backend.close()
    assert not set(threading.enumerate()) - before


def test_sync_starts_no_thread_and_leaves_nothing_behind(
    start: Callable[..., TransformersCb], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = start("sync")
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    ask(backend)
    processor, manager = backend.driver.processor, backend.driver.manager
    free = processor.cache.get_num_free_blocks()
    for _ in range(2):
        ask(backend)
        assert backend.driver.processor is processor
        assert not processor.has_pending_requests() and manager.input_queue.empty()
        assert processor.cache.get_num_free_blocks() == free == processor.cache.num_blocks
        assert not backend.driver.library.outputs(manager)


@pytest.mark.parametrize("driver", DRIVERS)
def test_failed_requests_are_counted_and_the_next_call_works(
    driver: str, start: Callable[..., TransformersCb], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, before = start(driver), set(threading.enumerate())
    forward, calls = backend.model.forward, []

    def broken(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("no such kernel")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(backend.model, "forward", broken)
        with pytest.raises(RuntimeError, match=r"4 of 5 requests failed: .*no such kernel"):
            backend.generate(PROMPTS, GREEDY, [1, 9, 9, 9, 9], True, 0)
        with pytest.raises(RuntimeError, match=r"5 of 5 requests failed: .*no such kernel"):
            ask(backend)
    assert set(threading.enumerate()) <= before  # loading leaves some that end by themselves
    assert ask(backend) == wanted == ask(backend)


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_interrupt_ends_the_call_and_the_next_one_works(
    driver: str, start: Callable[..., TransformersCb], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a time limit's signal does: into the middle of a step, or of waiting for a thread."""
    backend, before = start(driver), set(threading.enumerate())

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if driver == "sync":
            patch.setattr(backend.model, "forward", interrupt)
        else:
            patch.setattr(cb_manager, "ended", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(backend)
    assert set(threading.enumerate()) <= before  # loading leaves some that end by themselves
    assert ask(backend) == wanted


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_gets_on_with_nothing_raises_instead_of_hanging(
    driver: str, start: Callable[..., TransformersCb], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    backend = start(driver)
    with monkeypatch.context() as patch:
        patch.setattr(cb_drivers, "STALL_S", 0.2)
        patch.setattr(cb_drivers, "POLL_S", 0.1)
        patch.setattr(FIFOScheduler, "schedule_batch", lambda *_: [] if OLD else ([], False, 0, 0))
        with pytest.raises(RuntimeError, match=r"5 of 5 requests failed: .*(gets on with none|no step in 0.2 s)"):
            ask(backend)
    assert ask(backend) == wanted


def test_sync_ends_a_scheduler_that_never_finishes(
    start: Callable[..., TransformersCb], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = start("sync")
    steps = []
    ask(backend)
    monkeypatch.setattr(backend.driver.processor, "prepare_next_batch", lambda: True)
    monkeypatch.setattr(backend.driver.processor, "update_batch", lambda: None)
    monkeypatch.setattr(backend.driver.library, "step", lambda *_: steps.append(1))
    with pytest.raises(RuntimeError, match="5 of 5 requests failed"):
        ask(backend)
    assert len(steps) < 200


def test_requests_reach_a_thread_all_at_once() -> None:
    import queue

    class Manager:
        def __init__(self) -> None:
            self.input_queue: queue.Queue = queue.Queue()

        def add_request(self, prompt: list[int], max_new_tokens: int) -> str:
            self.input_queue.put((prompt, max_new_tokens))
            seen.append(real.qsize())
            return str(prompt)

    manager, seen = Manager(), []
    real = manager.input_queue
    assert cb_manager.add(manager, [([1], 2), ([3], 4)]) == ["[1]", "[3]"]
    assert seen == [0, 0] and manager.input_queue is real
    assert [real.get_nowait() for _ in range(2)] == [([1], 2), ([3], 4)]


def test_lost_and_failed_requests_are_told() -> None:
    good = SimpleNamespace(error=None, status=SimpleNamespace(name="FINISHED"), generated_tokens=[4])
    bad = SimpleNamespace(error=None, status=SimpleNamespace(name="FAILED"), generated_tokens=[])
    assert cb_manager.rows(["a"], {"a": good}) == [[4]]
    with pytest.raises(RuntimeError, match="1 of 2 requests failed: the engine lost it"):
        cb_manager.rows(["a", "b"], {"a": good})
    with pytest.raises(RuntimeError, match="2 of 3 requests failed: no reason given"):
        cb_manager.rows(["a", "b", "c"], {"a": good, "b": bad})


@pytest.mark.parametrize(
    ("option", "device", "found", "reason"),
    [
        ({}, "cpu", (5, 17), None),
        ({"attention": "paged|flash_attention_2"}, "cpu", (5, 17), "paged|flash_attention_2 needs a GPU"),
        ({"attention": "paged|flash_attention_2"}, "cuda", (5, 17), "needs the package flash-attn,"),
        ({"attention": "paged|flash_attention_3"}, "cuda", (5, 17), "needs the package flash-attn-3,"),
        ({"attention": "paged|flash_attention_4"}, "cuda", (5, 17), "needs the package flash-attn-4,"),
        ({"attention": "paged|flash_attention_4"}, "cuda", (4, 57), "knows FlashAttention 2 only"),
        ({"cuda_graph": True}, "cpu", (5, 17), "cuda_graph needs a GPU"),
        ({"cuda_graph": True}, "cuda", (4, 57), "has no CUDA graphs"),
        ({"cuda_graph": True}, "cuda", (5, 17), None),
        ({"cuda_graph": True, "compile": "reduce-overhead"}, "cuda", (5, 17), "leave cuda_graph off"),
        ({"compile": "reduce-overhead", "driver": "sync"}, "cpu", (5, 17), "reduce-overhead needs a GPU"),
        ({"compile": "reduce-overhead"}, "cuda", (5, 17), "needs driver: sync"),
        ({"compile": "reduce-overhead", "driver": "sync"}, "cuda", (4, 57), None),
        ({"compile": "default"}, "cpu", (5, 17), None),
    ],
)
def test_it_says_what_it_cannot_do(
    option: dict[str, object], device: str, found: tuple[int, int], reason: str | None, model: Path
) -> None:
    spec = replace(spec_of(model, **option), device=device, dtype="bfloat16")
    said = cb_support.problem(spec, found)
    assert said is None if reason is None else reason in said
    if "flash" in option.get("attention", "") and device == "cuda" and found[0] == 5:
        assert "has no float32" in cb_support.problem(replace(spec, dtype="float32"), found)


def test_torch_still_ties_cuda_graph_trees_to_a_thread() -> None:
    """The reason why reduce-overhead asks for driver sync; should it go, so should the refusal."""
    from torch._inductor import cudagraph_trees as trees

    raised = []

    def look() -> None:
        try:
            trees.get_obj(trees.local, "tree_manager_containers")
        except AssertionError as error:
            raised.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert raised


def test_another_attention_than_asked_for_is_refused(start: Callable[..., TransformersCb]) -> None:
    backend = start("sync", attention="paged|eager")
    assert backend.model.config._attn_implementation == ("eager_paged" if OLD else "paged|eager")
    backend.model.set_attn_implementation("sdpa_paged" if OLD else "paged|sdpa")
    with pytest.raises(FlexrollError, match=r"asked for attention .*eager.*, but transformers runs .*sdpa"):
        ask(backend)


def test_block_tables_only_where_flash_attention_reads_them() -> None:
    def blocks(version: int, size: int) -> int:
        return cb_support.block_table_blocks(f"paged|flash_attention_{version}", size, 1023)

    assert (blocks(2, 32), blocks(2, 256), blocks(3, 32), blocks(4, 256)) == (0, 4, 32, 0)
    assert cb_support.block_table_blocks("paged|sdpa", 256, 1023) == 0


# Compilation


def test_compilation_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            x = x * times
            torch._dynamo.graph_break()
            return x + 1

    module, really = Broken(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: really(function, backend="eager"))
    compile_forward(module, "default")
    with CompileWatch() as watch:
        module(torch.ones(3), 2)
    assert (watch.notes["graphs"], watch.notes["graph_breaks"], watch.notes["recompiles"]) == (2, 1, 0)
    with CompileWatch() as watch:
        module(torch.ones(3), 2)
    assert not any(watch.notes.values())
    with CompileWatch() as watch:
        assert module(torch.ones(3, dtype=torch.float64), 2).tolist() == [3, 3, 3]
    assert watch.notes["recompiles"] == 2 and watch.notes["recompile_limit_hits"] == 0
    with CompileWatch() as watch, torch._dynamo.config.patch(recompile_limit=2):
        module(torch.ones(3, dtype=torch.float16), 2)
    assert watch.notes["recompile_limit_hits"] == 1


@pytest.mark.parametrize("driver", DRIVERS[2:] if OLD else DRIVERS[1:])
def test_a_traced_forward_gives_the_same_tokens(
    driver: str, start: Callable[..., TransformersCb], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo as it is, without the minutes that Inductor's compilers take. 4.57 breaks into some twenty graphs, at its
    OpenTelemetry spans among others; 5 is one graph, compiled once for a length and once for any."""
    torch._dynamo.reset()
    really = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: really(function, backend="eager"))
    backend = start(driver, compile="default")
    first = backend.generate(PROMPTS, GREEDY, [NEW] * 5, True, 0)
    assert first.tokens == wanted and first.notes["recompiles"] >= 1
    assert (first.notes["graph_breaks"] > 0) == OLD
    again = backend.generate(PROMPTS, GREEDY, [NEW] * 5, True, 0)
    assert again.tokens == wanted and again.notes["graphs"] == 0


def test_notes_of_a_rounds_calls_are_summed() -> None:
    first, second = Generation([[1]], notes={"a": 1, "b": 2.5}), Generation([[1]], notes={"b": 1})
    assert worker._notes([first, second]) == {"a": 1, "b": 3.5}
    assert worker._notes([Generation([[1]])]) == {}
