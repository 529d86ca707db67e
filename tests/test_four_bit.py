"""NF4 weights: the bytes of transformers with bitsandbytes, its greedy tokens in fp32, and what is refused."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from engine_models import random_checkpoint
from flexroll.backends import nf4
from flexroll.backends import transformers_common as common
from flexroll.backends.base import EngineSpec
from flexroll.backends.flex import FlexBackend
from flexroll.backends.transformers_cb import TransformersCb
from flexroll.backends.transformers_generate import TransformersGenerate
from flexroll.bench.quantise import quantise
from flexroll.engine import Engine, SamplingParams
from flexroll.engine.quantised import Packed, QuantisedWeight, pack
from flexroll.engine.weights import load_weights
from flexroll.errors import FlexrollError
from flexroll.lora.adapter import write_adapter
from flexroll.schema.catalogue import LORA_TARGETS
from flexroll.schema.config import Sampling
from interpreter import DEVICE, NATIVE, run_interpreted, runs_kernel, starts_interpreter

PROMPTS = [[5, 17, 3, 44, 9], [8, 8, 31], [60, 2, 2, 7, 19, 23, 90]]
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.02,
}
KINDS = ("on_the_fly", "shard")
SKIP = ["layers.1.self_attn.k_proj", "layers.0.mlp.down_proj"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint with a tied head, an adapter on all its projections, and its shard with two modules left dense."""
    folder = tmp_path_factory.mktemp("four_bit")
    model = random_checkpoint(folder / "model", "qwen3", tie_word_embeddings=True, **SHAPE)
    write_adapter(model, folder / "adapter", rank=4, alpha=8, targets=list(LORA_TARGETS), b_std=0.1, seed=0)
    quantise(model, folder / "shard", dtype="float32", skip=SKIP, device="cpu")
    return folder


def spec_of(folder, kind, adapter_mode="none", dtype="float32", **option):
    return EngineSpec(
        model=folder / "model",
        adapter_mode=adapter_mode,
        adapter=folder / "adapter" if adapter_mode != "none" else None,
        merged=folder / "model",
        dtype=dtype,
        device="cpu",
        max_batch=len(PROMPTS),
        first_batch=len(PROMPTS),
        max_model_len=96,
        seed=0,
        shard=folder / "shard" if kind == "shard" else None,
        option={"four_bit": kind, **option},
    )


def greedy(backend, new_tokens=12):
    return backend.generate(PROMPTS, Sampling(), [new_tokens] * len(PROMPTS), True, 0).tokens


def library_model(folder, dtype, skip):
    """transformers with bitsandbytes alone, nothing of this project in between."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=False,
        llm_int8_skip_modules=skip,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config, device_map={"": "cpu"}
    ).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_bytes_and_scales_are_the_librarys(made, dtype):
    weights = load_weights(made / "model", dtype, "cpu", four_bit=True)
    model = library_model(made / "model", dtype, ["lm_head"])
    compared = 0
    for layer, block in enumerate(model.model.layers):
        for key, modules in {
            "qkv": [getattr(block.self_attn, f"{name}_proj") for name in "qkv"],
            "o": [block.self_attn.o_proj],
            "gate_up": [block.mlp.gate_proj, block.mlp.up_proj],
            "down": [block.mlp.down_proj],
        }.items():
            (run,) = weights.quantised[f"{layer}.{key}.weight"].runs
            assert torch.equal(run.packed, torch.cat([m.weight.data for m in modules]))
            assert torch.equal(run.absmax, torch.cat([m.weight.quant_state.absmax for m in modules]))
            compared += len(modules)
    assert compared == 7 * len(model.model.layers)
    assert not any(key.endswith(".weight") for key in weights.tensors)


@pytest.mark.parametrize("adapter_mode", ["none", "unmerged"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(made, kind, adapter_mode):
    spec = spec_of(made, kind, adapter_mode, compile=False, page_size=32)
    expected = greedy(TransformersGenerate(spec))
    assert greedy(FlexBackend(spec)) == expected
    dense = greedy(TransformersGenerate(spec_of(made, None, adapter_mode)))
    assert dense != expected, "the model is too easy: quantising it changes nothing"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families(tmp_path, family):
    """An untied head, and biases of q, k and v."""
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    random_checkpoint(tmp_path / "model", family, tie_word_embeddings=False, **shape)
    quantise(tmp_path / "model", tmp_path / "shard", dtype="float32", skip=["v_proj"], device="cpu")
    for kind in KINDS:
        spec = spec_of(tmp_path, kind, compile=False, page_size=32)
        assert greedy(FlexBackend(spec)) == greedy(TransformersGenerate(spec))


def test_shard_is_what_on_the_fly_makes_but_for_what_it_skips(made):
    ours = load_weights(made / "model", torch.float32, "cpu", four_bit=True)
    shard = load_weights(made / "shard", torch.float32, "cpu")
    dense = load_weights(made / "model", torch.float32, "cpu")
    assert set(shard.quantised) == set(ours.quantised) - {"0.down.weight"}
    for key, weight in shard.quantised.items():
        if key != "1.qkv.weight":
            assert [t.tolist() for t in weight.tensors] == [t.tolist() for t in ours.quantised[key].tensors]
    q, k, v = shard.quantised["1.qkv.weight"].runs
    assert isinstance(q, Packed) and isinstance(v, Packed)
    assert torch.equal(k, dense.view("model.layers.1.self_attn.k_proj.weight"))
    assert torch.equal(shard.tensors["0.down.weight"], dense.tensors["0.down.weight"])
    assert shard.tensors["head"] is shard.tensors["embed"]


def test_shard_files(made):
    """No head, for it is tied; the base's config.json, which every release of transformers reads, and nothing else."""
    names = load_file(made / "shard" / "model.safetensors").keys()
    assert "lm_head.weight" not in names and "model.layers.0.self_attn.q_proj.weight.absmax" in names
    config, base = (json.loads((made / name / "config.json").read_text()) for name in ("shard", "model"))
    kept = config.pop("quantization_config")["llm_int8_skip_modules"]
    assert kept == ["lm_head", "model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj"]
    assert {key: config[key] for key in base if key not in ("dtype", "torch_dtype")}.items() <= base.items()
    assert sorted(json.loads((made / "shard" / "files.json").read_text()))[0] == "config.json"
    assert not (made / "shard.part").exists()


def test_interrupted_quantise_leaves_what_was_there(made, monkeypatch):
    before = (made / "shard" / "files.json").read_bytes()

    def break_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("flexroll.bench.quantise._save", break_off)
    with pytest.raises(KeyboardInterrupt):
        quantise(made / "model", made / "shard", dtype="float32", skip=[], device="cpu")
    assert (made / "shard" / "files.json").read_bytes() == before
    monkeypatch.undo()
    quantise(made / "model", made / "shard", dtype="float32", skip=SKIP, device="cpu")
    assert (made / "shard" / "files.json").read_bytes() == before
    assert not (made / "shard.part").exists()


def test_bytes_of_the_weights(made):
    """Half a byte a weight and four bytes for 64 of them; all else as it was. Both kinds of engine count alike."""
    dense, packed = (load_weights(made / "model", torch.bfloat16, "cpu", four_bit=on) for on in (False, True))
    values = sum(t.numel() for key, t in dense.tensors.items() if key.endswith(".weight"))
    assert packed.n_bytes == dense.n_bytes - 2 * values + values // 2 + values // 16
    spec = spec_of(made, "on_the_fly", dtype="bfloat16", compile=False, page_size=32)
    backends = [TransformersGenerate(spec), FlexBackend(spec)]
    assert [b.memory()["weights"] for b in backends] == [packed.n_bytes] * 2


def test_bytes_of_double_quantised_scales(made):
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(
        made / "model", dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"}
    )
    state = model.model.layers[0].self_attn.q_proj.weight.quant_state
    single = library_model(made / "model", torch.bfloat16, ["lm_head"])
    saved = sum(3 * m.weight.quant_state.absmax.numel() for m in single.modules() if hasattr(m, "quant_state"))
    blocks = sum(4 * m.weight.quant_state.state2.absmax.numel() for m in model.modules() if hasattr(m, "quant_state"))
    assert state.nested
    assert common.parameter_bytes(model) == common.parameter_bytes(single) - saved + blocks


def test_doubly_quantised_checkpoint_runs(made, tmp_path):
    """As those on the hub are: scales that are quantised themselves."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(
        made / "model", dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path / "shard")
    spec = EngineSpec(
        **{**vars(spec_of(made, "shard", compile=False, page_size=32)), "shard": tmp_path / "shard"},
    )
    assert greedy(FlexBackend(spec)) == greedy(TransformersGenerate(spec))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapter_has_the_models_dtype(made, dtype):
    """PEFT takes the dtype of the weight beside it, which for a packed one is none to compute in."""
    for kind in KINDS:
        model = common.load_model(spec_of(made, kind, "unmerged", dtype), "sdpa")
        kinds = {p.dtype for name, p in model.named_parameters() if ".lora_" in name}
        assert kinds == {getattr(torch, dtype)}


def test_tied_head_is_tied(made):
    for kind in KINDS:
        model = common.load_model(spec_of(made, kind), "sdpa")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert type(model.lm_head) is torch.nn.Linear


def test_head_that_cannot_be_tied_is_refused(made):
    """A head of noise writes noise, fluently and in every engine."""
    model = common.load_model(spec_of(made, "shard"), "sdpa")
    model.lm_head.weight = torch.nn.Parameter(torch.randn(97, 128))
    nf4.tie_head(model, made / "shard")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = torch.nn.Parameter(torch.randn(97, 128))
    model.tie_weights = lambda *_, **__: None
    with pytest.raises(FlexrollError, match="its head is not tied to its embeddings"):
        nf4.tie_head(model, made / "shard")


@pytest.mark.parametrize("adapter_mode", ["none", "unmerged"])
@pytest.mark.parametrize("kind", KINDS)
def test_continuous_batching_writes_what_generate_does(made, kind, adapter_mode):
    """The published work saw gibberish here, with an adapter."""
    spec = spec_of(made, kind, adapter_mode)
    if (reason := TransformersCb.unavailable(spec)) is not None:
        pytest.skip(reason)
    backend = TransformersCb(spec)
    assert greedy(backend) == greedy(TransformersGenerate(spec))
    backend.close()


def test_fp32_is_computed_in_fp32(made):
    """On a CPU with AVX512-BF16 the library takes bf16 for whatever it is given, unless that is closed to it."""
    model = common.load_model(spec_of(made, "on_the_fly"), "sdpa")
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    weight = load_weights(made / "model", torch.float32, "cpu", four_bit=True).quantised["0.qkv.weight"]
    expected = weight.product(x, None)[:, : layer.out_features]
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_begins_as_fp32_does(made, kind):
    """With the adapter: what is added to a packed product has its dtype and is not lost."""
    spec = spec_of(made, kind, "unmerged", "bfloat16", compile=False, page_size=32)
    exact = greedy(TransformersGenerate(spec_of(made, kind, "unmerged")), 1)
    assert [row[0] for row in greedy(FlexBackend(spec), 1)] == [row[0] for row in exact]


def test_drawn_weights_are_quantised(made):
    engine = Engine.from_pretrained(
        made / "model", dummy=True, four_bit="on_the_fly", device="cpu", max_batch=2, max_model_len=64, compiled=False
    )
    dense = Engine.from_pretrained(
        made / "model", dummy=True, device="cpu", max_batch=2, max_model_len=64, compiled=False
    )
    assert set(engine.weights.quantised) == {key for key in dense.weights.tensors if key.endswith(".weight")}
    assert (
        engine.weights.quantised["0.down.weight"]
        .runs[0]
        .packed.equal(pack(dense.weights.tensors["0.down.weight"]).packed)
    )
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert [len(c.token_ids) for c in engine.generate(PROMPTS, params)] == [4] * len(PROMPTS)


@pytest.mark.parametrize("rows", [(3, 5), (64, 32), (1, 2, 61)])
def test_parts_that_share_no_blocks(rows):
    """A part whose values are no whole number of blocks keeps its own; the product is that of the parts."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 20, generator=generator) for n in rows]
    x, bias = torch.randn(4, 20, generator=generator), torch.randn(sum(rows), generator=generator)
    weight = QuantisedWeight([pack(part) for part in parts])
    dense = torch.cat([pack(part).unpacked(torch.float32) for part in parts])
    torch.testing.assert_close(weight.product(x, bias), x @ dense.T + bias)
    assert weight.columns == 20


def test_scratch_is_used_where_there_is_one():
    """As on a GPU: the matrix is unpacked into the buffer it is given."""
    part = pack(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    seen = []

    class Recorder:
        QuantState = __import__("bitsandbytes").functional.QuantState

        @staticmethod
        def dequantize_4bit(packed, state, out):
            seen.append((out.data_ptr(), tuple(out.shape)))
            return out.fill_(2.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexroll.engine.quantised.library", lambda: Recorder)
        weight = QuantisedWeight([part, torch.ones(8, 64)])
        weight.scratch = torch.zeros(10_000)
        y = weight.product(torch.ones(2, 64), None)
    assert seen == [(weight.scratch.data_ptr(), (64, 64))]
    assert y.tolist() == [[128.0] * 64 + [64.0] * 8] * 2


def test_merging_is_refused(made):
    for kind in KINDS:
        spec = spec_of(made, kind, "merged", compile=False)
        for backend in (FlexBackend, TransformersGenerate):
            with pytest.raises(FlexrollError, match="nothing merges into 4-bit weights; use unmerged"):
                backend(spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"four_bit": "shard"}, "write one with `flexroll quantise`"),
        ({"four_bit": "int8"}, "choose on_the_fly or shard"),
        ({"four_bit": "shard", "dummy": True}, "no shard of drawn weights"),
    ],
)
def test_engine_refuses(made, options, message):
    with pytest.raises(FlexrollError, match=message):
        Engine.from_pretrained(made / "model", device="cpu", **options)


def test_wrong_shards_are_refused(made, tmp_path):
    with pytest.raises(FlexrollError, match="no weight in it is in NF4"):
        Engine.from_pretrained(made / "model", device="cpu", four_bit="shard", shard=made / "model")
    with pytest.raises(FlexrollError, match="in 4 bits already"):
        load_weights(made / "shard", torch.float32, "cpu", four_bit=True)
    with pytest.raises(FlexrollError, match="no module of the model has 'q_porj' in its name"):
        quantise(made / "model", tmp_path / "x", dtype="float32", skip=["q_porj"], device="cpu")
    with pytest.raises(FlexrollError, match="cannot be read or written as a matrix"):
        load_weights(made / "shard", torch.float32, "cpu").view("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("ending", "value", "message"),
    [
        ("q_proj.weight.absmax", None, "lacks its scales"),
        ("q_proj.weight.quant_state.bitsandbytes__nf4", None, "lacks its scales"),
        ("q_proj.weight.absmax", torch.ones(3), "config.json asks for"),
        ("q_proj.weight", torch.zeros(64, 1, dtype=torch.uint8), "config.json asks for"),
    ],
)
def test_damaged_shards_are_refused(made, tmp_path, ending, value, message):
    folder = tmp_path / "shard"
    folder.mkdir()
    (folder / "config.json").write_bytes((made / "shard" / "config.json").read_bytes())
    tensors = load_file(made / "shard" / "model.safetensors")
    name = f"model.layers.0.self_attn.{ending}"
    del tensors[name]
    save_file(tensors if value is None else tensors | {name: value}, folder / "model.safetensors")
    with pytest.raises(FlexrollError, match=message):
        load_weights(folder, torch.float32, "cpu")


@starts_interpreter
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(f"{__file__}::test_fused_kernels_beside_nf4")


@runs_kernel
def test_fused_kernels_beside_nf4(made):
    """Norms, silu and the like are Triton's, products of packed weights the library's, those left dense either's."""
    options = {"dtype": torch.float32, "device": DEVICE, "max_batch": 4, "max_model_len": 64, "page_size": 32}
    options |= {"four_bit": "shard", "shard": made / "shard", "adapter": made / "adapter", "adapter_mode": "unmerged"}
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    plain, fused = (
        Engine.from_pretrained(made / "model", compiled=False, attention="flex", fused=on, **options).generate(
            PROMPTS, params
        )
        for on in (False, True)
    )
    assert [c.token_ids for c in fused] == [c.token_ids for c in plain]


def test_no_fused_product_of_a_packed_weight(made):
    pytest.importorskip("triton")
    from flexroll.engine.kernels.ops import TritonOps

    weights = load_weights(made / "model", torch.bfloat16, "cpu", four_bit=True)
    table = torch.zeros(8, 16)
    ops = TritonOps(weights, table, table, {})
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    assert ops._tiles("0.gate_up", x) is None
    torch.testing.assert_close(ops.linear("0.qkv", x), weights.quantised["0.qkv.weight"].product(x, None))


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
@pytest.mark.parametrize("adapter_mode", ["none", "unmerged"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_graphs_compute_the_same(made, kind, adapter_mode):
    """All layers share one buffer, in graphs and outside; in fp32 the tokens are transformers' as well."""
    options = {"device": "cuda", "max_batch": 4, "max_model_len": 96, "page_size": 32, "four_bit": kind}
    options |= {"shard": made / "shard"}
    if adapter_mode == "unmerged":
        options |= {"adapter": made / "adapter", "adapter_mode": "unmerged"}
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    for dtype in (torch.float32, torch.bfloat16):
        graphs, eager = (
            Engine.from_pretrained(made / "model", dtype=dtype, cuda_graphs=on, **options).generate(PROMPTS, params)
            for on in (True, False)
        )
        assert [c.token_ids for c in graphs] == [c.token_ids for c in eager]
        if dtype == torch.float32:
            spec = EngineSpec(**{**vars(spec_of(made, kind, adapter_mode)), "device": "cuda"})
            assert [c.token_ids for c in graphs] == greedy(TransformersGenerate(spec))
