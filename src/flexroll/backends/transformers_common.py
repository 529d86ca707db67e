"""What the backends that start from a transformers checkpoint share: finding it, loading it, checking a call.

torch and transformers are imported inside the functions: the module itself is cheap, and vLLM uses half of it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flexroll.backends import nf4
from flexroll.backends.base import EngineSpec
from flexroll.errors import FlexrollError
from flexroll.schema import architecture
from flexroll.schema.config import Sampling

DTYPE_BYTES = architecture.DTYPE_BYTES


def checkpoint_of(spec: EngineSpec) -> Path:
    """The checkpoint folder this spec runs: the NF4 shard where the option asks for it, the merged one in mode merged,
    else the base.

    Raises:
        FlexrollError: there is no such folder, it holds no config.json, or an adapter should be merged into 4 bits.
    """
    path = spec.merged if spec.adapter_mode == "merged" else spec.model
    if (four_bit := spec.option.get("four_bit")) is not None:
        if spec.adapter_mode == "merged":
            raise FlexrollError(
                "adapter mode 'merged': nothing merges into 4-bit weights; use unmerged, or drop four_bit"
            )
        path = spec.shard if four_bit == "shard" else spec.model
        if path is None:
            raise FlexrollError("four_bit 'shard' needs a checkpoint in NF4; write one with `flexroll quantise`")
    if path is None:
        raise FlexrollError("adapter mode 'merged' needs a merged checkpoint; write one with `flexroll merge`")
    if not (path / "config.json").is_file():
        raise FlexrollError(f"{path}: not a checkpoint folder (no config.json)")
    return path


def adapter_of(spec: EngineSpec) -> Path | None:
    """The PEFT folder to load beside the base weights (modes unmerged and request), None in the other modes.

    Raises:
        FlexrollError: the mode needs an adapter and there is none.
    """
    if spec.adapter_mode not in ("unmerged", "request"):
        return None
    if spec.adapter is None or not (spec.adapter / "adapter_config.json").is_file():
        raise FlexrollError(f"adapter mode '{spec.adapter_mode}' needs an adapter; write one with `flexroll adapter`")
    return spec.adapter


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise FlexrollError(f"{path}: not valid JSON; restore the checkpoint") from None


def kv_token_bytes(checkpoint: Path, dtype: str) -> int:
    """Bytes of K and V that one token takes over all layers, from config.json."""
    return architecture.kv_token_bytes(read_json(checkpoint / "config.json"), dtype)


def file_parameters(folder: Path, tied: bool) -> int:
    """Number of parameters in the safetensors files of a folder; with `tied`, a stored copy of the head is left out."""
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if tied and name == "lm_head.weight":
                    continue
                size = 1
                for extent in tensors.get_slice(name).get_shape():
                    size *= extent
                total += size
    return total


def check_request(spec: EngineSpec, prompts: list[list[int]], new_tokens: list[int]) -> None:
    """Refuse what no engine can do, before any of them fails in its own way.

    Raises:
        FlexrollError: not a length a prompt, one below 1, an empty prompt, or one that leaves no room for its new ones.
    """
    if len(new_tokens) != len(prompts):
        raise FlexrollError(f"{len(prompts)} prompts but {len(new_tokens)} lengths; give one each")
    for index, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
        if new < 1:
            raise FlexrollError(f"new_tokens is {new}; ask for at least 1")
        if not prompt:
            raise FlexrollError(f"prompt {index} is empty; every prompt needs at least one token")
        if len(prompt) + new > spec.max_model_len:
            raise FlexrollError(
                f"prompt {index} has {len(prompt)} tokens and {new} are to follow, but max_model_len is "
                f"{spec.max_model_len}; raise it or shorten the prompt"
            )


def cut(tokens: list[int], eos: Iterable[int], new_tokens: int, ignore_eos: bool) -> list[int]:
    """The tokens that count: at most new_tokens, and without ignore_eos up to the first EOS, EOS included."""
    tokens = tokens[:new_tokens]
    if not ignore_eos:
        stops = set(eos)
        for position, token in enumerate(tokens):
            if token in stops:
                return tokens[: position + 1]
    return tokens


def repeated(items: list[Any], samples: int) -> list[Any]:
    """Every item `samples` times, one after another: for a library that is given a prompt once a sample."""
    return [item for item in items for _ in range(samples)]


def finish(rows: list[list[int]], eos: list[int], new_tokens: list[int], ignore_eos: bool) -> list[list[int]]:
    """Cut every row to its own length (see `cut`), and make sure that none is short.

    Raises:
        RuntimeError: a row ended early although nothing allowed it to.
    """
    rows = [cut(row, eos, new, ignore_eos) for row, new in zip(rows, new_tokens, strict=True)]
    for index, (row, new) in enumerate(zip(rows, new_tokens, strict=True)):
        ended = not ignore_eos and row and row[-1] in eos
        if len(row) != new and not ended:
            raise RuntimeError(f"sequence {index} got {len(row)} of {new} tokens")
    return rows


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Our sampling as arguments of transformers' GenerationConfig. Off is written out: its default is top_k 50."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }


def left_padded(prompts: list[list[int]], device: str) -> tuple[Any, Any]:
    """(ids, mask), both [prompts, longest prompt] int64 on the device; padding is id 0, masked."""
    import torch

    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def static_batches(
    prompts: list[list[int]], new_tokens: list[int], samples: int, running: int
) -> Iterator[tuple[list[list[int]], list[int]]]:
    """(prompts, new tokens) of one batch after another, at most `running` sequences each, for an engine that runs a
    batch from start to end together."""
    prompts, new_tokens = repeated(prompts, samples), repeated(new_tokens, samples)
    for first in range(0, len(prompts), running):
        yield prompts[first : first + running], new_tokens[first : first + running]


def parameter_bytes(model: Any) -> int:
    """Bytes of a module's parameters, a shared one counted once; of 4-bit ones the packed values and their scales."""
    tensors = []
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        nested = getattr(state, "state2", None)
        tensors += [parameter, *(part.absmax for part in (state, nested) if part is not None)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load_model(spec: EngineSpec, attention: str) -> Any:
    """Load the checkpoint on the spec's device, with the adapter's LoRA layers in place where the mode is unmerged.

    Returns the transformers model itself, never PEFT's wrapper. LoRA weights get the model's dtype: PEFT would keep
    them in float32, which no other engine does. The checkpoint's generation_config is emptied, for its values fill in
    whatever a call leaves out. Option four_bit: the layers' weights in NF4, by bitsandbytes, the head dense.

    Raises:
        FlexrollError: a folder is missing, the adapter lacks weights of modules it says it adapts, or (four_bit) the
            adapter is to be merged.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    checkpoint, adapter = checkpoint_of(spec), adapter_of(spec)
    logging.disable_progress_bar()
    four_bit, more = spec.option.get("four_bit"), {}
    if four_bit is not None:  # it is quantised where it is loaded, and cannot be moved or cast as a whole afterwards
        more["device_map"] = {"": spec.device}
    if four_bit == "on_the_fly":
        more["quantization_config"] = nf4.nf4_config(spec.dtype, ["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, spec.dtype), attn_implementation=attention, local_files_only=True, **more
    )
    if four_bit is not None:
        nf4.compute_in(model, spec.dtype)
        nf4.tie_head(model, checkpoint)
    if adapter is not None:
        model = _with_adapter(model, adapter)
    model.generation_config = GenerationConfig()
    if four_bit is None:
        model = model.to(spec.device)
    return model.eval().requires_grad_(False)


def _with_adapter(model: Any, adapter: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            wrapped = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
        except UserWarning:
            raise FlexrollError(f"{adapter}: lacks weights its adapter_config.json speaks of; write it anew") from None
    return wrapped.get_base_model()
