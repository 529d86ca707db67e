"""The page: sound HTML that loads nothing and runs nothing of its data, the same content as results.md, and in a real
browser no error, no request, no overflow, and a filter that filters."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

for name in ("jinja2", "matplotlib", "pandas"):
    pytest.importorskip(name)

import report_runs
import synthetic
from browser import Browser, find_browser
from flexroll.analysis.model import Analysis
from flexroll.analysis.run import analyse
from flexroll.errors import FlexrollError
from flexroll.report import headline, inline, render, svg
from flexroll.report.figures import ALT
from flexroll.report.page import Anchors, blocks, page, view, write_page
from flexroll.report.text import Table, cell
from flexroll.schema.cells import Cell
from flexroll.schema.config import Config
from flexroll.schema.load import load_config
from flexroll.schema.records import Record

Built = tuple[Analysis, Path, str]
REPORT = report_runs.REPORT
VOID = {"meta", "link", "input", "br", "hr", "img"}
NASTY = "</pre><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> & &amp; ```` **x** [a](b)"
REASON = "bad | <b>x</b> [0](nowhere.json) ![p](http://example.com/p.png) [j](javascript:alert(1)) `<i>` tensor[1](2)"


class Page(HTMLParser):
    """What a page holds; fails where a tag is not closed or closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert "svg" in self.open, f"<{tag}/> outside of a drawing"

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if attributes.get("id")]  # type: ignore[misc]

    @property
    def text(self) -> str:
        return "".join(data for tag, data in self.texts if tag not in ("script", "style"))


def check(text: str, results: Path) -> Page:
    """The page, after what must hold of any."""
    found = Page(text)
    ids = found.ids
    assert len(ids) == len(set(ids)), sorted(i for i in set(ids) if ids.count(i) > 1)
    for tag, attributes in found.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "xlink:href", "src"):
                assert value
                if value.startswith("#"):
                    assert unquote(value[1:]) in ids, value
                elif tag == "a":
                    assert (results / unquote(value)).is_file(), value
                else:
                    assert value.startswith("data:"), (tag, value)
    assert [tag for tag, _ in found.tags].count("script") == 1
    assert not re.search(r"@import|url\((?!#)", text)
    return found


def nasty(made: Record) -> Record:
    """The record with text in it that would be markup."""
    if made.status != "ok":
        return made.model_copy(update={"reason": REASON})
    samples = [synthetic.sample(text=NASTY).model_copy(update={"prompt": f"What? {NASTY}\nA line."})]
    return made.model_copy(update={"samples": samples})


def config(**changes: Any) -> Config:
    return report_runs.config(3, title="A <b>run</b> & more", **changes)


def whole() -> Config:
    """One that fills every section."""
    return config(grpo=report_runs.TRAINING)


def make(cell: Cell) -> Record:
    return nasty(report_runs.record(cell))


def build(results: Path, made: Config, make_record: Any, drift: bool = True) -> Built:
    """A run with its document and page: its analysis, the page's path, and the document."""
    analysis = report_runs.build(results, made, make_record, drift)
    document = render.render(made, results, REPORT).read_text()
    return analysis, page(results, REPORT), document


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("run"), whole(), make)


@pytest.fixture(scope="module")
def sound(run: Built) -> Page:
    return check(run[1].read_text(), run[1].parent)


def headings(document: str, level: int) -> list[str]:
    plain = re.sub(r"^(`{3,})text\n.*?^\1$", "", document, flags=re.M | re.S)
    return re.findall(rf"^{'#' * level} (.+)$", plain, flags=re.M)


def test_the_page_is_sound_and_whole(run: Built, sound: Page) -> None:
    analysis, path, document = run
    anchor = Anchors()
    expected = [anchor(heading) for level in (2, 3) for heading in headings(document, level)]
    assert [a["id"] for a in sound.all("h2")] == ["at-a-glance", *expected[: len(headings(document, 2))]]
    assert set(expected) <= set(sound.ids)
    rows = [a for a in sound.all("tr") if a.get("data-verdict")]
    assert sorted(str(a["id"]) for a in rows) == sorted(f"claim-{v.id}" for v in analysis.verdicts)
    assert {a["aria-label"] for a in sound.all("svg")} >= {"tok/s against batch", "gain of every option"}
    drawn = {f"figure-{file.stem}" for file in (path.parent / "figures").iterdir()}
    assert len(drawn) == len(ALT) and drawn <= set(sound.ids)
    assert "None" not in sound.text.split() and "Undefined" not in sound.text


def test_data_stays_text(run: Built, sound: Page) -> None:
    assert sound.text.count("<script>window.hacked = 1</script>") >= 2 and "</pre><script>" in sound.text
    assert "A <b>run</b> & more" in sound.text
    assert not sound.all("img") and not sound.all("i")
    assert "bad | <b>x</b> [0](nowhere.json)" in sound.text and "[j](javascript:alert(1))" in sound.text
    assert "http://example.com" not in str([a.get("href") for a in sound.all("a")])
    assert "````" in sound.text  # a fence of the text's own


def test_no_script_but_its_own_may_run(sound: Page) -> None:
    policy = next(a["content"] for a in sound.all("meta") if a.get("http-equiv"))
    assert policy and "default-src 'none'" in policy and "script-src 'sha256-" in policy


def test_same_bytes_every_time(run: Built, tmp_path: Path) -> None:
    first = run[1].read_bytes()
    assert page(run[1].parent, REPORT).read_bytes() == first
    assert build(tmp_path, whole(), make)[1].read_bytes() == first


@pytest.mark.parametrize("make_record", [lambda cell: None, synthetic.skipped], ids=["missing", "skipped"])
def test_nothing_ran(tmp_path: Path, make_record: Any) -> None:
    _, path, _ = build(tmp_path, config(), make_record, drift=False)
    found = check(path.read_text(), tmp_path)
    assert not found.all("svg") and "No round was measured" in found.text


def test_the_published_run(tmp_path: Path, root: Path) -> None:
    shutil.copytree(root / "results" / "h200_engine", tmp_path / "run")
    wanted = load_config(root / "workflow" / "presets" / "h200-engine.yaml", root)
    analysis = analyse(wanted, tmp_path / "run", REPORT / "claims.yaml")
    render.render(wanted, tmp_path / "run", REPORT)
    found = check(page(tmp_path / "run", REPORT).read_text(), tmp_path / "run")
    assert {"figure-throughput", "figure-ratio", "figure-roofline", "figure-memory_parts"} <= set(found.ids)
    assert len([a for a in found.all("tr") if a.get("data-verdict")]) == len(analysis.verdicts)
    assert "of the memory-bandwidth floor" in found.text


def test_workloads_and_torch_versions(tmp_path: Path) -> None:
    """Sections that a run may lack, and a run on a CPU."""
    base = synthetic.CONFIG["experiments"]
    both = [{"backend": "flex"}, {"backend": "vllm"}]
    common = {"new_tokens": 64, "stacks": ["torch2.11"], "backends": both, "batches": [8]}
    experiments = base | {
        "group": common | {"title": "Group", "section": "group", "samples": 4, "sampling": "equivalence"},
        "uneven": common | {"title": "Uneven", "section": "uneven", "slots": 4, "new_tokens": {"min": 8, "max": 64}},
        "memory": common | {"title": "Memory", "section": "memory"},
        "broke": common | {"title": "Broke", "section": "broke"},
    }
    _, path, document = build(tmp_path, synthetic.config(experiments=experiments), synthetic.record)
    found = check(path.read_text(), tmp_path)
    assert {"group-sampling", "uneven-lengths", "memory", "broke-broke"} <= set(found.ids)
    assert len(found.all("h2")) == len(headings(document, 2)) + 1
    assert len(found.all("h3")) == len(headings(document, 3))


def test_keys_may_come_and_go(run: Built, tmp_path: Path) -> None:
    analysis, path, _ = run
    results = tmp_path / "run"
    shutil.copytree(path.parent, results)
    values = render.context(analysis, results, {})
    values["something_new"] = object()
    for key in ("sentences", "verdict_counts"):
        values.pop(key, None)
    values["claims"] = [(topic, table, Table([])) for topic, table in values["claims"]]
    values["sweeps"] = {key: [item[:3] for item in items] for key, items in values["sweeps"].items()}
    assert write_page(analysis, results, REPORT, {}, values) == results / "results.html"
    assert not check((results / "results.html").read_text(), results).all("svg")
    assert blocks([("b", "B", Table([]), "one")])[0].says == ["one"]
    assert blocks([("c", "C", Table([]), ["x", ""])])[0].says == ["x"]


def test_errors_say_what_to_do(run: Built, tmp_path: Path) -> None:
    results = tmp_path / "run"
    shutil.copytree(run[1].parent, results)
    with pytest.raises(FlexrollError, match=r"page\.js"):
        page(results, tmp_path)
    for name in ("page.js", "page.css"):
        shutil.copy(REPORT / name, tmp_path)
    with pytest.raises(FlexrollError, match="no such template"):
        page(results, tmp_path)
    (tmp_path / "page.html.j2").write_text("ok\n{{ nonsense }}\n")
    with pytest.raises(FlexrollError, match="nonsense"):
        page(results, tmp_path)


def known(target: str) -> bool:
    return target in ("a.json", "#options")


@pytest.mark.parametrize(
    ("markdown", "html"),
    [
        ("a < b & c", "a &lt; b &amp; c"),
        ("[1](a.json) [2](b.json)", '<a href="a.json" title="a.json">1</a> [2](b.json)'),
        ("see [`x`](#options)", 'see <a href="#options" title="#options"><code>x</code></a>'),
        ("**no** `a*b*c` *that*", "<strong>no</strong> <code>a*b*c</code> <em>that</em>"),
        ("2 * 3 * 4 ** 5", "2 * 3 * 4 ** 5"),
        ("`a` and `b", "<code>a</code> and `b"),
        ("``a`b``", "<code>a`b</code>"),
        (cell("a|b <i> &lt;"), "a|b &lt;i&gt; &lt;"),
        (f"`{cell('a|b <i>')}`", "<code>a|b &lt;i&gt;</code>"),
        ("[x](javascript:alert)", "[x](javascript:alert)"),
        ("**a [1](a.json)**", '<strong>a <a href="a.json" title="a.json">1</a></strong>'),
        ("\"'", "&quot;&#x27;"),
        (r"\*a\*", "*a*"),
        ("a_b_c", "a_b_c"),
    ],
)
def test_inline_markdown(markdown: str, html: str) -> None:
    assert inline.to_html(markdown, known) == html


def test_plain_text_of_markdown() -> None:
    assert inline.to_text("**contradicted** by `x <y>` [1](a.json) &lt;") == "contradicted by x <y> 1 <"


def test_headings_get_the_ids_of_github() -> None:
    anchor = Anchors()
    assert anchor("Claims: batch sweep") == "claims-batch-sweep"
    assert anchor("Batch sweep, both engines (`batch_sweep`)") == "batch-sweep-both-engines-batch_sweep"
    assert [anchor("Options"), anchor("Options")] == ["options", "options-1"]


def test_a_claim_is_one_row_with_its_badge() -> None:
    row = {"Claim": "`a-b`: “q”", "Text, section": "1, S", "Published": "–", "Measured": "2", "On": "H200"}
    row |= {"Verdict": "**reproduced**", "Why": "w"}
    shown = view(Table([row], frozenset({"Claim", "Verdict", "Why"})), lambda text: inline.to_html(text, known))
    assert [str(header) for header, _ in shown.headers] == ["Claim", "Published", "Measured", "Verdict", "Why"]
    [found] = shown.rows
    assert found.id == "claim-a-b" and found.verdict == "reproduced"
    assert [c.badge for c in found.cells] == ["", "", "", "reproduced", ""]
    assert found.cells[0].html.endswith("<small>1, S</small>") and found.cells[2].html == "2<small>H200</small>"
    assert found.cells[1].look == "num none published" or "none" in found.cells[1].look


def test_a_drawing_has_ids_and_colours_of_the_page(run: Built) -> None:
    source = (run[1].parent / "figures" / "throughput.svg").read_text()
    drawing = svg.inline(source, "one", 'a "label"')
    assert drawing.startswith('<svg class="plot" role="img" aria-label="a &quot;label&quot;" viewBox="0 0 ')
    assert "<!DOCTYPE" not in drawing and "metadata" not in drawing and "<!--" not in drawing and "http" not in drawing
    assert all(found.startswith("one-") for found in re.findall(r'\bid="([^"]+)"', drawing))
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', drawing)) and "var(--fig-flex)" in drawing
    style = (REPORT / "page.css").read_text()
    light, dark = style.split("prefers-color-scheme: dark")
    for colour in svg.NAMES.values():
        assert f"--fig-{colour}:" in light and (colour == "paper" or f"--fig-{colour}:" in dark), colour
    with pytest.raises(ValueError, match="one: no figure"):
        svg.inline("<svg></svg>", "one", "")


def test_headline_numbers(run: Built) -> None:
    found = {card.label: card for card in headline.cards(run[0])}
    sweep = found["vLLM's tok/s: batch sweep, batch 64"]
    assert sweep.tone == "bad" and sweep.value.endswith("×") and "n = 3: slower" in sweep.detail
    assert found["base weights changed by refreshing"].value == "0"
    assert found["in use on the device: flex, batch 64"].value == "20.0 GB"
    assert found["cells have a result"].value == f"{sum(c.status == 'ok' for c in run[0].cells)} of {len(run[0].cells)}"
    judged = found["judged published claims are reproduced"]
    assert "contradicted by their own source" in judged.detail


# In a real browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no browser on PATH (chromium, google-chrome); Debian: apt-get install chromium")
    with Browser(program, tmp_path_factory.mktemp("profile")) as started:
        yield started


def address(path: Path, **filtered: str) -> str:
    fragment = "&".join(f"{key}={quote(value)}" for key, value in filtered.items())
    return path.as_uri() + (f"#{fragment}" if fragment else "")


SHOWN = "[...document.querySelectorAll('tr[data-verdict]')].filter(r => r.offsetParent !== null)"


def shown(browser: Browser) -> list[str]:
    """Verdicts of the claims that can be seen."""
    return browser.evaluate(f"{SHOWN}.map(r => r.dataset.verdict)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_it_fits_and_asks_for_nothing(browser: Browser, run: Built, width: int, dark: bool) -> None:
    browser.open(address(run[1]), width, dark=dark)
    told = browser.evaluate("({...document.documentElement.dataset})")
    assert (told["width"], told["overflow"]) == (str(width), "0")
    assert browser.requests == [address(run[1])] and browser.problems == []
    assert browser.evaluate("window.hacked === undefined")
    # Letters and lines of figures stand out from what is behind them.
    script = """(() => {
        const light = (colour) => {
            const [r, g, b] = colour.match(/\\d+/g).map(Number);
            return (3 * r + 6 * g + b) / 10;
        };
        const ground = light(getComputedStyle(document.body).backgroundColor);
        const ink = light(getComputedStyle(document.querySelector('.plot [id*="text_"] g')).fill);
        return [ground, ink, light(getComputedStyle(document.body).color)];
    })()"""
    ground, ink, text = browser.evaluate(script)
    assert (ground < 128) == dark and abs(ink - ground) > 150 and abs(text - ground) > 150


def test_the_page_opens_on_what_was_judged(browser: Browser, run: Built) -> None:
    browser.open(address(run[1]))
    judged = [v for v in run[0].verdicts if v.verdict != "not run"]
    assert len(shown(browser)) == len(judged) > 0 and "not run" not in shown(browser)
    assert browser.evaluate("document.querySelector('output').textContent").startswith(f"{len(judged)} of ")


@pytest.mark.parametrize("verdict", ["reproduced", "not run", "contradicted by its own source"])
def test_a_fragment_filters_by_verdict(browser: Browser, run: Built, verdict: str) -> None:
    browser.open(address(run[1], verdict=verdict))
    assert shown(browser) == [verdict] * sum(v.verdict == verdict for v in run[0].verdicts)
    assert browser.evaluate("document.querySelector('.chips [aria-pressed=true]').dataset.verdict") == verdict
    assert browser.problems == []


def test_filters_of_topic_and_text(browser: Browser, run: Built) -> None:
    browser.open(address(run[1], verdict="all", topic="drift"))
    assert len(shown(browser)) == sum(v.topic == "drift" for v in run[0].verdicts)
    assert browser.evaluate("[...document.querySelectorAll('.topic')].filter(t => !t.hidden).length") == 2  # with broke
    browser.open(address(run[1], verdict="all", q="drift-ulp"))
    assert browser.evaluate(f"{SHOWN}.map(r => r.id)") == ["claim-drift-ulp"]
    browser.open(address(run[1], verdict="all", q="no such words"))
    assert shown(browser) == []


def test_filters_by_hand(browser: Browser, run: Built) -> None:
    browser.open(address(run[1]))
    browser.evaluate("document.querySelector('.chips [data-verdict=\"all\"]').click()")
    assert len(shown(browser)) == len(run[0].verdicts)
    assert browser.evaluate("location.hash") == "#verdict=all"
    typing = "const q = document.querySelector('[name=q]'); q.value = 'ulp'; q.dispatchEvent(new Event('input'))"
    browser.evaluate(typing)
    assert 0 < len(shown(browser)) < 20 and browser.evaluate("location.hash") == "#verdict=all&q=ulp"
    browser.evaluate("document.querySelector('button.all').click()")
    assert len(shown(browser)) == len(run[0].verdicts)
    browser.evaluate("document.querySelector('.chips [data-verdict=\"judged\"]').click()")
    assert browser.evaluate("location.hash") == "" and browser.problems == []


def test_a_link_to_a_claim_shows_it(browser: Browser, run: Built) -> None:
    hidden = next(v for v in run[0].verdicts if v.verdict == "not run")
    browser.open(run[1].as_uri() + f"#claim-{hidden.id}")
    assert f"claim-{hidden.id}" in browser.evaluate(f"{SHOWN}.map(r => r.id)")
    seen = f"document.getElementById('claim-{hidden.id}').getBoundingClientRect().top"
    assert 0 <= browser.evaluate(seen) < 900


@pytest.mark.parametrize("fragment", ["verdict=90%", "%", "no-such-place", "q=%ff"])
def test_any_fragment_is_taken(browser: Browser, run: Built, fragment: str) -> None:
    browser.open(f"{run[1].as_uri()}#{fragment}")
    assert browser.problems == [] and browser.evaluate("'shown' in document.documentElement.dataset")


def test_tables_are_sorted(browser: Browser, run: Built) -> None:
    browser.open(address(run[1]))
    script = """(() => {
        const table = document.getElementById('batch-sweep-sweep').parentNode.querySelector('h3 ~ .scroll table');
        const heads = [...table.tHead.rows[0].cells];
        const column = heads.findIndex((h) => h.textContent.includes('95 %'));
        const button = heads[column].querySelector('button');
        const read = () => [...table.tBodies[0].rows].map((r) => r.cells[column].textContent.trim());
        button.click(); const up = read(); button.click(); const down = read();
        return [up, down, heads[column].getAttribute('aria-sort')];
    })()"""
    up, down, told = browser.evaluate(script)
    numbers = [float(text.split("–")[0]) for text in up if text != "–"]
    assert told == "descending" and numbers == sorted(numbers) and len(numbers) > 10
    assert up[-1] == down[-1] == "–"  # the failed cell
    assert [float(text.split("–")[0]) for text in down if text != "–"] == sorted(numbers, reverse=True)


def test_without_its_script_the_page_is_whole(browser: Browser, run: Built, tmp_path: Path) -> None:
    text = re.sub(r"<script>.*</script>", "", run[1].read_text(), flags=re.S)
    (tmp_path / "page.html").write_text(text)
    browser.open((tmp_path / "page.html").as_uri())
    assert len(shown(browser)) == len(run[0].verdicts)
    assert browser.evaluate("document.getElementById('filter').offsetParent === null")
    assert browser.evaluate("document.querySelector('.legend').offsetParent !== null")


def test_it_can_be_photographed(browser: Browser, run: Built, tmp_path: Path) -> None:
    import matplotlib.image

    browser.open(address(run[1]), 400)
    browser.screenshot(tmp_path / "page.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "page.png").shape
    assert width == 400 and height > 5000


def test_scripts_of_data_do_not_run_even_unescaped(browser: Browser, run: Built, tmp_path: Path) -> None:
    """The policy is a second wall behind escaping."""
    text = run[1].read_text().replace("<main>", f"<main>{NASTY.removeprefix('</pre>')}", 1)
    (tmp_path / "page.html").write_text(text)
    browser.open((tmp_path / "page.html").as_uri())
    assert browser.evaluate("window.hacked === undefined")
    assert any("Content Security Policy" in problem for problem in map(json.dumps, browser.problems))
