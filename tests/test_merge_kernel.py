"""The fused merge against plain torch: on a GPU as it is, elsewhere in a process under Triton's interpreter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from engine_models import random_checkpoint
from flexroll.engine.weights import load_weights
from flexroll.errors import FlexrollError
from flexroll.lora import drift
from flexroll.lora.adapter import AdapterWeights, read_adapter, write_adapter
from flexroll.lora.merge import MergedCopy
from flexroll.schema.catalogue import LORA_TARGETS
from interpreter import DEVICE, INTERPRETED, NATIVE, run_interpreted, runs_kernel, starts_interpreter

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TILE = (16, 32)

if INTERPRETED or NATIVE:
    from flexroll.lora import merge_kernel
    from flexroll.lora.merge_kernel import Module, build_table, launch


@starts_interpreter
def test_under_the_interpreter():
    run_interpreted(__file__)


def coarse(shape, seed, dtype, steps=64):
    """Multiples of 1/steps in [-1, 1): few bits, so that fp32 sums of products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-steps, steps, shape, generator=generator) / steps).to(DEVICE, dtype)


def fine(shape, seed, dtype, std=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).to(DEVICE, dtype)


def fused_modules(sizes, rank, weight, adapter, make=coarse, first_row=3):
    """Modules whose weights are rows of fused matrices with rows of others before and after; also these matrices."""
    modules, fused = [], []
    for seed, (rows, cols) in enumerate(sizes):
        base = make((first_row + rows + 5, cols), seed, weight)
        out = torch.full_like(base, 7.0)
        a, b = make((rank, cols), 100 + seed, adapter[0]), make((rows, rank), 200 + seed, adapter[1])
        part = slice(first_row, first_row + rows)
        modules.append(Module(base[part], out[part], a, b))
        fused.append((base, out))
    return modules, fused


def by_torch(module, scale):
    return (module.base.float() + scale * (module.b.float() @ module.a.float())).to(module.base.dtype)


@runs_kernel
@pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
@pytest.mark.parametrize("rank", [1, 4, 32, 40])
@pytest.mark.parametrize("adapter", [(BF16, BF16), (FP32, FP32), (BF16, FP32)])
@pytest.mark.parametrize("weight", [BF16, FP32])
def test_one_launch_equals_torch_bit_by_bit(weight, adapter, rank, precision):
    modules, fused = fused_modules([(33, 50), (16, 64), (1, 17)], rank, weight, adapter)
    bases = [base.clone() for base, _ in fused]
    launch(build_table(modules, 2.0, TILE), precision)
    for module, (base, out), before in zip(modules, fused, bases, strict=True):
        assert torch.equal(module.out, by_torch(module, 2.0))
        assert torch.equal(base, before)
        assert bool((out[:3] == 7).all()) and bool((out[3 + len(module.out) :] == 7).all())
    if weight == BF16 and rank > 1:
        exact = modules[0].base.float() + 2.0 * (modules[0].b.float() @ modules[0].a.float())
        assert bool((exact != modules[0].out.float()).any())  # there was something to round


@runs_kernel
@pytest.mark.parametrize("sizes", [[(40, 64), (24, 136)], [(40, 64), (24, 132)]])
@pytest.mark.parametrize("adapter", [BF16, FP16, FP32])
def test_wide_accesses_only_where_every_row_allows_them(sizes, adapter):
    modules, _ = fused_modules(sizes, 16, BF16, (adapter, adapter), first_row=4)
    table = build_table(modules, 0.5, (16, 64))
    assert [g.aligned for g in table.groups] == [all(cols % 8 == 0 for _, cols in sizes)]
    launch(table)
    for module in modules:
        assert torch.equal(module.out, by_torch(module, 0.5))


@runs_kernel
@pytest.mark.parametrize("rank", [3, 32, 96])
@pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
def test_the_product_has_the_error_of_fp32(precision, rank):
    """Full fp32 operands into fp32 weights; products of operands cut to bfloat16 are far outside the same bound."""
    modules, _ = fused_modules([(40, 70)], rank, FP32, (FP32, FP32), make=fine)
    (m,) = modules
    launch(build_table(modules, 2.0, TILE), precision)
    base, a, b = (t.double() for t in (m.base, m.a, m.b))
    bound = (rank + 4) * 2.0**-23 * (base.abs() + 2 * b.abs() @ a.abs())
    assert bool(((m.out - (base + 2 * b @ a)).abs() <= bound).all())
    cut = base + 2 * b.bfloat16().double() @ a.bfloat16().double()
    assert float(((m.out - cut).abs() > bound).float().mean()) > 0.9


@runs_kernel
def test_modules_of_several_ranks_and_dtypes_form_groups():
    modules = []
    for rank, adapter in ((4, (BF16, BF16)), (8, (FP32, FP32)), (4, (FP32, FP32)), (4, (BF16, BF16))):
        modules += fused_modules([(20, 40)], rank, BF16, adapter)[0]
    table = build_table(modules, 1.0, TILE)
    assert [len(g.rows) for g in table.groups] == [2, 1, 1]
    launch(table)
    for module in modules:
        assert torch.equal(module.out, by_torch(module, 1.0))


@runs_kernel
def test_what_the_kernel_cannot_merge_is_named():
    def module(**changes):
        made = {"base": (20, 40), "out": (20, 40), "a": (4, 40), "b": (20, 4)}
        tensors = {name: torch.zeros(shape, device=DEVICE) for name, shape in made.items()}
        return Module(**{**tensors, **changes})

    for changes in ({"a": torch.zeros(4, 39)}, {"b": torch.zeros(20, 5)}, {"b": torch.zeros(21, 4)}):
        with pytest.raises(FlexrollError, match="cannot take an update"):
            build_table([module(**changes)], 1.0)
    with pytest.raises(FlexrollError, match="cannot be merged"):
        build_table([module(out=torch.zeros(20, 40, dtype=BF16))], 1.0)
    with pytest.raises(FlexrollError, match="contiguous rows"):
        build_table([module(a=torch.zeros(40, 4, device=DEVICE).T)], 1.0)
    with pytest.raises(FlexrollError, match="'tf32'"):
        launch(build_table([module()], 1.0), "tf32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(checkpoint, adapter) of a small model with fused q, k, v and gate, up."""
    folder = tmp_path_factory.mktemp("merge")
    random_checkpoint(folder / "base", "qwen3", head_dim=16)
    write_adapter(folder / "base", folder / "adapter", targets=list(LORA_TARGETS), rank=8, alpha=16, b_std=0.05)
    return folder / "base", folder / "adapter"


@pytest.fixture
def copy(folders):
    base, adapter = folders
    return MergedCopy(load_weights(base, BF16, DEVICE), read_adapter(adapter).to(DEVICE, FP32))


@runs_kernel
@pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
def test_refresh_follows_the_adapter(copy, precision):
    """Changed in place, replaced, of another type, rank, scale or memory order; the table is made anew when needed."""
    copy.precision = precision
    places = {key: t.data_ptr() for key, t in copy.weights.tensors.items()}
    base = drift.weights_sha256(copy.base)
    table, seen = copy._table, {drift.weights_sha256(copy.weights)}
    scale, pairs = copy.adapter.scale, copy.adapter.pairs

    def refreshed(adapter, same_table):
        nonlocal table
        copy.adapter = adapter
        assert drift.wrong_weights(copy, copy.base)[0] > 0  # stale
        copy.refresh()
        assert drift.wrong_weights(copy, copy.base)[0] == 0
        assert (copy._table is table) == same_table
        table = copy._table
        digest = drift.weights_sha256(copy.weights)
        assert digest not in seen
        seen.add(digest)

    for a, _ in pairs.values():
        a.mul_(1.5)
    refreshed(copy.adapter, same_table=True)
    refreshed(AdapterWeights(scale, {m: (a + 0.01, b) for m, (a, b) in pairs.items()}), same_table=False)
    refreshed(AdapterWeights(scale, {m: (a.bfloat16(), b.bfloat16()) for m, (a, b) in pairs.items()}), same_table=False)
    turned = {m: ((a * 2).T.contiguous().T, (b * 2).T.contiguous().T) for m, (a, b) in pairs.items()}
    refreshed(AdapterWeights(scale, turned), same_table=False)
    refreshed(AdapterWeights(scale, {m: (a[:5], b[:, :5]) for m, (a, b) in pairs.items()}), same_table=False)
    refreshed(AdapterWeights(3.0, {m: (a.double(), b) for m, (a, b) in pairs.items()}), same_table=False)
    assert {key: t.data_ptr() for key, t in copy.weights.tensors.items()} == places
    assert drift.weights_sha256(copy.base) == base


@runs_kernel
def test_refresh_uses_the_kernel_and_leaves_what_no_adapter_touches(copy, monkeypatch):
    launches = []
    monkeypatch.setattr(merge_kernel, "launch", lambda *args: launches.append(args))
    copy.refresh()
    assert launches == [(copy._table, "bf16x6")] and len(copy._table.groups) == 1
    monkeypatch.undo()
    touched = [f"{m}.weight" for m in copy.adapter.pairs]
    for name, view in copy.weights.named_views():
        assert torch.equal(view, copy.base.view(name)) == (name not in touched), name


@runs_kernel
def test_the_drift_check_passes_over_the_kernel(folders):
    report = drift.verify(*folders, cycles=2, device=DEVICE, peft=False)
    assert report["base_identical"] and report["inference_identical"]
    assert report["merged_exact"] and report["weights_checked"] > 0
