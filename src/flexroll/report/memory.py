"""The memory table: where the bytes of each configuration go, and what sizes its KV cache."""

from __future__ import annotations

from flexroll.analysis.model import Analysis, Result
from flexroll.report import text
from flexroll.report.measured import batch
from flexroll.report.text import Table, cell


def experiments(analysis: Analysis) -> list[str]:
    """Experiments of section memory, and those in which vLLM is given flex's KV budget."""
    chosen = [r.experiment for r in analysis.results if r.section == "memory" or r.option_values.get("equal_kv")]
    return list(dict.fromkeys(chosen))


def table(results: list[Result], existing: set[str]) -> Table:
    """Where the bytes go: weights, KV, and the rest of what the device holds, one row a configuration."""
    rows = []
    for r in results:
        m = r.memory
        # On a CPU the total is the machine's, with all that else runs there.
        known = r.on_gpu and None not in (m.device_total, m.weights, m.kv_reserved)
        rest = m.device_total - m.weights - m.kv_reserved if known else None  # type: ignore[operator]
        rows.append(
            {
                "Backend": text.series_label(r.backend, r.adapter),
                "Option": f"`{cell(r.option)}`",
                "Batch": batch(r),
                "KV budget": _budget(r),
                "Weights, GB": text.gigabytes(m.weights),
                "KV, GB": text.gigabytes(m.kv_reserved),
                "Everything else, GB": text.gigabytes(rest),
                "Peak, GB": text.gigabytes(m.peak_allocated),
                "In use, GB": text.gigabytes(m.device_total),
                "tok/s, median": text.rate(r.tps) if r.status == "ok" else r.status,
                "Stack": r.stack,
                "Raw": text.links(r.files, existing),
            }
        )
    left = frozenset({"Backend", "Option", "KV budget", "Stack", "Raw"})
    return Table(rows, left).without_empty().without_constant("Batch", "Stack")


def _budget(result: Result) -> str:
    """What sizes the KV cache."""
    values = result.option_values
    if values.get("equal_kv"):
        return "that of flex"
    if values.get("kv_cache_memory_bytes"):
        return f"{text.gigabytes(values['kv_cache_memory_bytes'])} GB"
    if result.backend == "vllm":
        on_gpu = f"{text.percent(values.get('gpu_memory_utilization'))} of the device"
        return on_gpu if result.on_gpu else f"{values['cpu_kv_gib']} GiB"
    return f"{values['kv_tokens']} tokens" if values.get("kv_tokens") else "what runs at once"
