"use strict";
// Filters claims and sorts tables. Without it the page is whole: every row stands in it.
(() => {
  const form = document.getElementById("filter");
  const rows = [...document.querySelectorAll("tr[data-verdict]")];
  const topics = [...document.querySelectorAll(".topic")];
  const chips = [...form.querySelectorAll("[data-verdict]")];
  const judged = (verdict) => verdict !== "not run";
  const first = rows.some((row) => judged(row.dataset.verdict)) ? "judged" : "all";
  let state = { verdict: first, topic: "", q: "" };

  const matches = (row) => {
    const { verdict } = row.dataset;
    if (state.verdict === "judged" ? !judged(verdict) : state.verdict !== "all" && state.verdict !== verdict) return false;
    if (state.topic && row.closest(".topic").dataset.topic !== state.topic) return false;
    const text = row.textContent.toLowerCase();
    return state.q.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  };

  const show = () => {
    let count = 0;
    for (const row of rows) {
      row.hidden = !matches(row);
      count += !row.hidden;
    }
    for (const topic of topics) {
      const own = [...topic.querySelectorAll("tr[data-verdict]")];
      const empty = own.every((row) => row.hidden);
      const note = topic.querySelector(".hidden-rows");
      if (note) {
        // A topic with a section of its own keeps its heading.
        note.hidden = !empty;
        topic.querySelector(".scroll").hidden = empty;
      } else {
        topic.hidden = empty;
      }
    }
    for (const chip of chips) chip.setAttribute("aria-pressed", chip.dataset.verdict === state.verdict);
    form.elements.topic.value = state.topic;
    if (form.elements.q.value !== state.q) form.elements.q.value = state.q;
    form.querySelector("output").textContent = `${count} of ${rows.length} claims shown`;
    document.documentElement.dataset.shown = count;
  };

  const change = (part) => {
    state = { ...state, ...part };
    const told = Object.entries(state).filter(([name, value]) => value && !(name === "verdict" && value === first));
    const fragment = new URLSearchParams(told).toString();
    history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname + location.search);
    show();
  };

  // The browser itself has not looked for it yet while the page loads.
  const named = (fragment) => {
    try {
      return document.getElementById(decodeURIComponent(fragment));
    } catch {
      return null; // no fragment of ours
    }
  };

  // #verdict=...&topic=...&q=... is a filter; any other fragment a place, and a hidden claim is shown for it.
  const follow = () => {
    const fragment = location.hash.slice(1);
    let place = document.getElementById("claims");
    if (fragment.includes("=")) {
      const given = new URLSearchParams(fragment);
      state = { verdict: given.get("verdict") || first, topic: given.get("topic") || "", q: given.get("q") || "" };
    } else {
      place = named(fragment);
      const row = place && place.closest("tr[data-verdict]");
      if (row && !matches(row)) state = { verdict: "all", topic: "", q: "" };
      if (place && place.closest(".topic[hidden]")) state = { verdict: "all", topic: "", q: "" };
    }
    show();
    if (place) place.scrollIntoView();
  };

  for (const chip of chips) chip.addEventListener("click", () => change({ verdict: chip.dataset.verdict }));
  for (const all of document.querySelectorAll("button.all")) {
    all.addEventListener("click", () => change({ verdict: "all", topic: "", q: "" }));
  }
  form.elements.topic.addEventListener("change", (event) => change({ topic: event.target.value }));
  form.elements.q.addEventListener("input", (event) => change({ q: event.target.value.trim() }));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  show();
  if (location.hash) follow();
  window.addEventListener("hashchange", follow);

  // A cell's number is the first in it; dashes and words come last, whichever the direction.
  const number = (text) => {
    const found = text.replace(/−/g, "-").match(/[+-]?\d[\d,]*\.?\d*(e[+-]?\d+)?/i);
    return found ? Number(found[0].replace(/,/g, "")) : NaN;
  };
  const sort = (table, column, header) => {
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const numeric = header.classList.contains("num");
    const key = (row) => (numeric ? number(row.cells[column].textContent) : row.cells[column].textContent.trim());
    const sign = down ? -1 : 1;
    const order = (a, b) => {
      if (!numeric) return sign * a[0].localeCompare(b[0], "en", { numeric: true });
      if (Number.isNaN(a[0]) || Number.isNaN(b[0])) return Number.isNaN(a[0]) - Number.isNaN(b[0]);
      return sign * (a[0] - b[0]);
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].map((row) => [key(row), row]).sort(order).map(([, row]) => row));
  };
  for (const table of document.querySelectorAll("main table:not(.facts)")) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => sort(table, column, header));
    });
  }

  // Marks where the reader is, and tells how far the page is wider than the window: 0, whatever its tables hold.
  const links = [...document.querySelectorAll(".contents a")];
  const heads = links.map((link) => document.getElementById(link.hash.slice(1)));
  let now = null;
  const here = () => {
    const at = heads.findLastIndex((head) => head.getBoundingClientRect().top < 120);
    const link = links[Math.max(at, 0)];
    if (link === now) return;
    if (now) now.classList.remove("here");
    now = link;
    now.classList.add("here");
    now.parentNode.scrollTo({ left: now.offsetLeft - 60 });
  };
  document.addEventListener("scroll", here, { passive: true });
  here();
  const measure = () => {
    const root = document.documentElement;
    root.dataset.overflow = root.scrollWidth - root.clientWidth;
    root.dataset.width = root.clientWidth;
  };
  window.addEventListener("resize", measure);
  measure();
})();
