"""`flexroll profile`: where a decode step's time goes, kernel by kernel."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexroll.errors import FlexrollError

STEPS = 32  # decode steps that are profiled


@dataclass(frozen=True)
class KernelTime:
    """One kernel's part of a decode step. calls, us: a step's; share: of all kernels' time."""

    name: str
    calls: float
    us: float
    share: float


@dataclass(frozen=True)
class Profile:
    """A decode step of `batch` sequences that start at `length` tokens.

    step_ms: wall time a step without the profiler; kernels: largest first, with the profiler on. bytes_read: of the
    weights and of the keys and values that a step must read, at the mean length.
    """

    device: str
    attention: str
    batch: int
    length: int
    step_ms: float
    bytes_read: int
    kernels: list[KernelTime]

    @property
    def bandwidth(self) -> float:
        """TB/s of what must be read."""
        return self.bytes_read / self.step_ms / 1e9


def profile_decode(model: Path, batch: int, length: int, dummy: bool, engine_options: dict[str, Any]) -> Profile:
    """Profile greedy decoding with torch.profiler; on a GPU kernels, on a CPU operators.

    Raises:
        FlexrollError: the model cannot be loaded, or length and batch do not fit.
    """
    import torch

    from flexroll.engine import Engine, SamplingParams

    if length < 2:
        raise FlexrollError("profile: a prompt needs at least 2 tokens")
    limit = length + STEPS + 1
    # One prefill for all prompts: every decode step then has the whole batch, and no prefill lies between two of them.
    engine = Engine.from_pretrained(
        model,
        dummy=dummy,
        max_batch=batch,
        max_model_len=limit,
        max_prefill_tokens=batch * length,
        **engine_options,
    )
    generator = torch.Generator().manual_seed(0)
    vocab = engine.config.vocab_size
    prompts = [torch.randint(0, vocab, (length,), generator=generator).tolist() for _ in range(batch)]
    params = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    engine.generate(prompts, params)
    engine.generate(prompts, params)
    step_ms = 1000 * engine.stats.decode_s / engine.stats.steps
    on_gpu = engine.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        engine.generate(prompts, params)
        time.sleep(0.01)
    kernels = _kernels(profiler.events(), on_gpu, engine.stats.steps)
    kv = batch * (length + STEPS // 2) * engine.config.kv_bytes_per_token(engine.weights.dtype.itemsize)
    return Profile(
        torch.cuda.get_device_name(engine.device) if on_gpu else "CPU",
        engine.attention,
        batch,
        length,
        step_ms,
        engine.weights.n_bytes + kv,
        kernels,
    )


def _kernels(events: Any, on_gpu: bool, steps: int) -> list[KernelTime]:
    """Decode's part of the events: on a GPU what comes after the first prepare_kernel; on a CPU operators' own time."""
    total: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    if on_gpu:
        events = [e for e in events if e.device_type.name == "CUDA"]
        begin = min((e.time_range.start for e in events if e.name.startswith("prepare_kernel")), default=0)
        events = [e for e in events if e.time_range.start >= begin]
    for event in events:
        total[event.name] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        calls[event.name] += 1
    everything = sum(total.values()) or 1
    return [KernelTime(n, calls[n] / steps, us / steps, us / everything) for n, us in total.most_common()]


def as_markdown(profile: Profile, least: float = 0.002) -> str:
    """A table of the kernels with at least that share, and a line for the rest."""
    p = profile
    lines = [
        f"{p.device}, attention {p.attention}, batch {p.batch}, {p.length} to {p.length + STEPS} tokens: "
        f"{p.step_ms:.3f} ms a step, {p.bytes_read / 1e9:.2f} GB to read, {p.bandwidth:.2f} TB/s",
        "",
        "| kernel | calls a step | us each | us a step | share |",
        "|---|---:|---:|---:|---:|",
    ]
    shown = [k for k in p.kernels if k.share >= least]
    for k in shown:
        lines.append(f"| `{k.name[:60]}` | {k.calls:.1f} | {k.us / k.calls:.2f} | {k.us:.1f} | {k.share:.1%} |")
    rest = p.kernels[len(shown) :]
    if rest:
        lines.append(f"| {len(rest)} others | | | {sum(k.us for k in rest):.1f} | {sum(k.share for k in rest):.1%} |")
    return "\n".join(lines)
