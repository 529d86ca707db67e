"""Merging an adapter: always afresh from the pristine base, in fp32, rounded once; never unmerged.

PEFT's merge and unmerge do not cancel in bf16 (one adds an fp32 delta, the other subtracts a rounded one), so weights
that are merged and unmerged in turn drift. Two copies make the question go away: the base is never written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

from flexroll.engine.checkpoint import checkpoint_files, read_tensors
from flexroll.engine.weights import DecoderWeights, load_weights
from flexroll.errors import FlexrollError
from flexroll.lora.adapter import AdapterWeights, check_fits, read_adapter


class MergedCopy:
    """An inference copy of `base` with `adapter` merged in.

    Matrices the adapter touches are a second copy; embeddings, norms and head are shared with the base. `refresh`
    writes into the same storage, so CUDA graphs captured over it stay valid. `adapter` may be replaced or changed in
    place between refreshes; its module names must stay.
    precision: how the fused kernel makes B @ A, see lora.merge_kernel.launch; without it the product is plain fp32.
    """

    def __init__(self, base: DecoderWeights, adapter: AdapterWeights, precision: str = "bf16x6") -> None:
        self.base = base
        self.adapter = adapter.to(base.device)
        self.precision = precision
        self.weights = base.copy_for_merging([f"{module}.weight" for module in adapter.pairs])
        self._kernel = _fused_kernel(base.device, base.dtype)
        self._table, self._built_for = None, None
        self.refresh()

    @property
    def n_bytes(self) -> int:
        """Bytes of both copies (shared tensors once) and of the adapter."""
        tensors = [*self.base.tensors.values(), *self.weights.tensors.values()]
        tensors += [t for pair in self.adapter.pairs.values() for t in pair]
        return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """merged = round(fp32(base) + scale * B @ A) for every module of the adapter.

        On a GPU one launch of a fused kernel (lora.merge_kernel) on the current stream, elsewhere module by module.
        """
        if self._kernel is not None:
            self._refresh_fused()
            return
        for module in self.adapter.pairs:
            name = f"{module}.weight"
            self.weights.view(name).copy_(self.base.view(name).float() + self.adapter.delta(module))

    def _refresh_fused(self) -> None:
        """Launch over the table of addresses, made anew if anything it describes is no longer where or what it was."""
        device = self.base.device
        pairs = {
            module: (self._kernel.readable(a, device), self._kernel.readable(b, device))
            for module, (a, b) in self.adapter.pairs.items()
        }
        described = [self.adapter.scale, *self.adapter.pairs]
        for tensors in (self.base.tensors, self.weights.tensors):
            described += [t.data_ptr() for t in tensors.values()]
        described += [(t.data_ptr(), t.dtype, t.shape, t.stride()) for pair in pairs.values() for t in pair]
        if described != self._built_for:
            modules = []
            for module, (a, b) in pairs.items():
                name = f"{module}.weight"
                modules.append(self._kernel.Module(self.base.view(name), self.weights.view(name), a, b))
            self._table, self._built_for = self._kernel.build_table(modules, self.adapter.scale), described
        self._kernel.launch(self._table, self.precision)


def _fused_kernel(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module with the fused kernel where it can run: Triton may be missing, and needs a GPU or its interpreter."""
    try:
        from flexroll.lora import merge_kernel
    except ImportError:
        return None
    return merge_kernel if merge_kernel.usable(device, dtype) else None


@torch.no_grad()
def write_merged(model_dir: Path, adapter_dir: Path, out: Path) -> None:
    """Write a checkpoint with the adapter merged in, tensor by tensor; config and tokenizer are copied along.

    Files keep the names and dtypes of the base's. A folder that was left half-written has no config.json.
    """
    adapter = read_adapter(adapter_dir)
    base = load_weights(model_dir, torch.bfloat16, "meta")
    check_fits(adapter, base, adapter_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)
    wanted = {f"{module}.weight": module for module in adapter.pairs}
    for path in checkpoint_files(model_dir):
        tensors = {}
        for name, tensor in read_tensors(model_dir, [path]):
            module = wanted.pop(name, None)
            if module is not None:
                tensor = (tensor.float() + adapter.delta(module)).to(tensor.dtype)
            tensors[name] = tensor
        save_file(tensors, out / path.name, {"format": "pt"})
    if wanted:
        raise FlexrollError(f"{model_dir}: no tensor '{next(iter(wanted))}' to merge into")
    for path in sorted(model_dir.iterdir(), key=lambda p: p.name == "config.json"):
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(path, out / path.name)
    json.loads((out / "config.json").read_text())
