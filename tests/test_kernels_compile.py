"""Every kernel of a decode step compiles for Hopper and Blackwell, without a GPU, also where a count is 1.

Triton makes an integer argument that is 1 a constant; code that is right for any other count can fail on it.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from flexroll.engine.kernels import linear, norm, paged_attention, paged_prefill, rope_store, step

ATTENTION = {
    **dict.fromkeys(("q_norm", "k_norm", "keys", "values", "out"), "*bf16"),
    **dict.fromkeys(("cos", "sin", "partial", "stats"), "*fp32"),
    **dict.fromkeys(("arrived", "table"), "*i32"),
    **dict.fromkeys(("slots", "positions"), "*i64"),
    **dict.fromkeys(("B", "max_blocks", "pool_tokens"), "i32"),
    **dict.fromkeys(("eps", "scale"), "fp32"),
}
PREFILL = {
    **dict.fromkeys(("q", "keys", "values", "out"), "*bf16"),
    **dict.fromkeys(("blocks", "table"), "*i32"),
    **dict.fromkeys(("block_stride", "max_blocks", "pool_tokens"), "i32"),
    "scale": "fp32",
}
ROPE = {
    **dict.fromkeys(("qkv", "q_norm", "k_norm", "q", "keys", "values"), "*bf16"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("slots", "positions", "q_rows"), "*i64"),
    **dict.fromkeys(("M", "max_blocks", "pool_tokens"), "i32"),
    "table": "*i32",
    "eps": "fp32",
}
PREPARE = {
    **dict.fromkeys(("staged", "table", "block_of", "full_count", "full_list", "partial_count"), "*i32"),
    **dict.fromkeys(("partial_list", "ints", "row_ints"), "*i32"),
    **dict.fromkeys(("tokens", "lengths", "ids", "slots", "positions", "longs", "row_longs"), "*i64"),
    **dict.fromkeys(("reals", "row_reals"), "*fp32"),
    **dict.fromkeys(("n_slots", "max_blocks", "pages", "B"), "i32"),
}
HEADS = {"GROUP": 4, "HEAD_DIM": 128, "PAGE": 64}
# kernel, types of its arguments, constants, warps, stages
KERNELS = {
    "attention": (
        paged_attention.decode_attention_kernel,
        {**ATTENTION, "qkv": "*bf16"},
        {**HEADS, "BLOCK_T": 16, "SPLITS": 1, "PARTS": 1, "PDL": True},
        1,
        5,
    ),
    "attention, split": (
        paged_attention.decode_attention_kernel,
        {**ATTENTION, "qkv": "*fp32"},
        {**HEADS, "BLOCK_T": 32, "SPLITS": 4, "PARTS": 2, "PDL": True},
        1,
        5,
    ),
    "prefill": (
        paged_prefill.prefill_attention_kernel,
        PREFILL,
        {**HEADS, "HEADS": 4, "BLOCK_Q": 32, "BLOCK_T": 64, "PDL": True},
        paged_prefill.WARPS,
        paged_prefill.STAGES,
    ),
    "rope": (rope_store.rope_store_kernel, ROPE, {**HEADS, "HEADS": 8, "LANES": 64, "PARTS": 1, "PDL": True}, 2, 3),
    "norm": (
        norm.add_norm_kernel,
        {**dict.fromkeys(("x", "weight", "out"), "*bf16"), "y": "*fp32", "ids": "*i64", "M": "i32", "eps": "fp32"},
        {"HIDDEN": 2560, "BLOCK": 4096, "PARTS": 2, "EMBED": False, "PDL": True},
        4,
        3,
    ),
    "silu": (norm.silu_mul_kernel, {"x": "*bf16", "out": "*bf16", "N": "i32"}, {"BLOCK": 1024, "PDL": True}, 4, 3),
    **{
        f"{place} of {rows}, {'split' if split else 'whole'}": (
            linear.linear_kernel,
            {"x": f"tensordesc<bf16[{tiles.m}, {tiles.k}]>", "w": f"tensordesc<bf16[{tiles.n}, {tiles.k}]>"}
            | {"y": "*fp32" if split else "*bf16", **dict.fromkeys(("M", "N", "K"), "i32")},
            {
                "BLOCK_M": tiles.m,
                "BLOCK_N": tiles.n,
                "BLOCK_K": tiles.k,
                "SPLIT_K": 3 if split else 1,
                "GATED": place == "gate_up",
                "PDL": True,
            },
            tiles.warps,
            tiles.stages,
        )
        for place, table in linear.TILES.items()
        for rows, tiles in table.items()
        for split in ((False, True) if tiles.load else (False,))
    },
    "prepare": (step.prepare_kernel, PREPARE, {"PAGE": 64, "BLOCKS": 16, "LISTS": True}, 1, 3),
    "advance": (
        step.advance_kernel,
        {**dict.fromkeys(("sampled", "slots", "positions", "tokens", "lengths"), "*i64"), "logprobs": "*fp32"}
        | {"out": "*i32", "B": "i32"},
        {"BLOCK": 128},
        4,
        3,
    ),
}
COUNTS = ("B", "M", "max_blocks", "n_slots")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("ones", [False, True], ids=["", "counts of 1"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name, ones, capability):
    kernel, types, constants, warps, stages = KERNELS[name]
    assert set(kernel.arg_names) == {*types, *constants}
    constants = {**constants, **{n: 1 for n in types if ones and n in COUNTS}}
    place = kernel.arg_names.index
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names},
        {(place(n),): value for n, value in constants.items()},
        {(place(n),): [["tt.divisibility", 16]] for n, kind in types.items() if kind[0] == "*" and n not in constants},
    )
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": constants.get("PDL", False)}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == constants.get("PDL", False)
    assert "ld.local" not in compiled.asm["ptx"]
