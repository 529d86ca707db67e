"""Does the base stay what it was? Hashes before and after refresh cycles, and PEFT's merge/unmerge for contrast."""

from __future__ import annotations

import hashlib
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from flexroll.engine.weights import DecoderWeights, load_weights
from flexroll.lora.adapter import AdapterWeights, check_fits, read_adapter
from flexroll.lora.merge import MergedCopy


def weights_sha256(weights: DecoderWeights) -> str:
    """sha256 over name and raw bytes of every parameter, in checkpoint order."""
    digest = hashlib.sha256()
    for name, tensor in weights.named_views():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def verify(
    model_dir: Path,
    adapter_dir: Path,
    *,
    cycles: int = 10,
    noise_std: float = 1e-3,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    peft: bool = True,
) -> dict[str, Any]:
    """Run `cycles` perturb-and-refresh cycles on the double copy, and as many merge/unmerge cycles of PEFT's.

    A cycle adds N(0, noise_std^2) noise to A and B, as a training step would, and refreshes. Three statements are
    checked: the base's hash is what it was; after every cycle each merged weight is the pristine one plus the delta,
    summed in fp32 in any order and rounded once (`wrong_weights`); the inference copy is bit by bit what it was once
    the adapter's values are restored.
    """
    device = torch.device(device)
    base = load_weights(model_dir, dtype, device)
    adapter = read_adapter(adapter_dir)
    check_fits(adapter, base, adapter_dir)
    before = weights_sha256(base)
    # Pristine values from a second read of the files: comparing the base with itself would prove nothing.
    pristine = load_weights(model_dir, dtype, device)
    copy = MergedCopy(base, adapter.to(device, torch.float32))
    merged_before = weights_sha256(copy.weights)
    initial = {n: (a.clone(), b.clone()) for n, (a, b) in copy.adapter.pairs.items()}
    generator = torch.Generator().manual_seed(seed)
    checks, times = [wrong_weights(copy, pristine)], []
    for _ in range(cycles):
        _perturb(copy.adapter, noise_std, generator)
        times.append(_timed_refresh(copy, device))
        checks.append(wrong_weights(copy, pristine))
    wrong, ties = (sum(counts) for counts in zip(*checks, strict=True))
    for name, (a, b) in initial.items():
        copy.adapter.pairs[name][0].copy_(a)
        copy.adapter.pairs[name][1].copy_(b)
    copy.refresh()
    after = weights_sha256(base)
    return {
        "model": model_dir.name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cycles": cycles,
        "noise_std": noise_std,
        "torch_version": torch.__version__,
        "base_sha256_before": before,
        "base_sha256_after": after,
        "base_identical": before == after,
        "inference_identical": weights_sha256(copy.weights) == merged_before,
        "merged_exact": wrong == 0,
        "merged_wrong": wrong,
        "rounding_ties": ties,
        "weights_checked": (cycles + 1) * sum(pristine.view(f"{m}.weight").numel() for m in adapter.pairs),
        "refresh_ms_median": 1000 * statistics.median(times),
        **(_peft_contrast(model_dir, adapter_dir, cycles, noise_std, dtype, device, seed) if peft else {"peft": None}),
    }


def _perturb(adapter: AdapterWeights, std: float, generator: torch.Generator) -> None:
    """Noise from a CPU generator, so that every device sees the same."""
    for a, b in adapter.pairs.values():
        for tensor in (a, b):
            tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor) * std)


def _timed_refresh(copy: MergedCopy, device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = time.perf_counter()
    copy.refresh()
    wait()
    return time.perf_counter() - started


@torch.no_grad()
def wrong_weights(copy: MergedCopy, pristine: DecoderWeights, block: int = 2**22) -> tuple[int, int]:
    """(merged weights that are wrong, weights for which more than one value is right).

    Two fp32 sums that take their terms in different orders may lie on either side of a rounding boundary, so a merged
    weight is held against fp64: it is right if one rounding of some fp32 sum's possible result gives it. Such a sum is
    off by at most (rank + 4) * 2^-23 * (|weight| + |scale| * sum |b a|): each product, sum and scaling costs up to
    2^-24 of that (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3), twice as much where tensor cores
    cut off. Against bfloat16's 2^-9 that is narrow: weights rounded twice, or merged from older values, are found.
    block: weights that are checked at once, which bounds the memory: fp64 temporaries of a few times their number.
    """
    wrong = ties = 0
    for module, (a, b) in copy.adapter.pairs.items():
        name = f"{module}.weight"
        merged, base = copy.weights.view(name), pristine.view(name)
        a, b = a.double(), b.double() * copy.adapter.scale
        step = max(1, block // base.shape[1])
        for start in range(0, base.shape[0], step):
            part = slice(start, start + step)
            exact = base[part].double() + b[part] @ a
            error = (base[part].double().abs() + b[part].abs() @ a.abs()) * ((a.shape[0] + 4) * 2.0**-23)
            # torch rounds fp64 to 16 bits by way of fp32; the bound has room for that.
            lowest, highest = (exact - error).to(base.dtype), (exact + error).to(base.dtype)
            # Stated as what is right, since a NaN compares false.
            right = (merged[part] >= lowest) & (merged[part] <= highest)
            wrong += right.numel() - int(right.sum())
            ties += int((lowest != highest).sum())
    return wrong, ties


def _peft_contrast(
    model_dir: Path,
    adapter_dir: Path,
    cycles: int,
    noise_std: float,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> dict[str, Any]:
    """What PEFT's merge_adapter/unmerge_adapter does to the base weights over the same cycles.

    max_abs_diff: largest |weight - pristine weight| after the cycle's unmerge; share_changed: share of targeted weights
    that differ from the pristine ones.
    """
    import importlib.metadata

    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device)
    wrapped = PeftModel.from_pretrained(model, adapter_dir)
    layers = [m for m in wrapped.modules() if isinstance(m, LoraLayer)]
    pristine = [m.get_base_layer().weight.detach().clone() for m in layers]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    with torch.no_grad():
        for cycle in range(1, cycles + 1):
            for layer in layers:
                for pair in (layer.lora_A, layer.lora_B):
                    weight = pair[wrapped.active_adapter].weight
                    weight.add_(torch.randn(weight.shape, generator=generator).to(weight) * noise_std)
            wrapped.merge_adapter()
            wrapped.unmerge_adapter()
            largest, changed, total = 0.0, 0, 0
            for layer, before in zip(layers, pristine, strict=True):
                difference = (layer.get_base_layer().weight.float() - before.float()).abs()
                largest = max(largest, float(difference.max()))
                changed += int((difference > 0).sum())
                total += difference.numel()
            rows.append({"cycle": cycle, "max_abs_diff": largest, "share_changed": changed / total})
    return {"peft": {"cycles": rows}, "peft_version": importlib.metadata.version("peft")}
