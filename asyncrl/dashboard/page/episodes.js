// The tab of kept episodes: a table that the server filters, sorts and pages. If the state of the page names
// an episode, the tab shows that episode instead. With `view=dead` it shows the dead letters.
//
// Keys of the state: `run`, one of several that are shown; a filter by its name; `sort`; `offset`; `episode`, STEP/ID;
// `view`; and those of an episode's page.

import * as api from "./api.js";
import { openDeadLetters } from "./dead.js";
import { element, fill } from "./dom.js";
import { openEpisode } from "./episode.js";
import { drawFilters, FILTERS, syncFilters } from "./filters.js";
import { change, link, state } from "./state.js";
import { count, nodesOf, number } from "./text.js";

const PAGE_ROWS = 100;
const REFRESH_MS = 4000;
const COLUMNS = [
  ["step", "step", "the learner step that trained it"],
  ["id", "episode", "its id: ticket, member, attempt"],
  ["reward", "reward", "the shaped reward that baselines compare"],
  ["outcome", "outcome", "the verifier's verdict"],
  ["sampled", "sampled", "tokens that the policy sampled"],
  ["tokens", "tokens", "all tokens"],
  ["turns", "turns", "turns of the policy"],
  ["tool_calls", "calls", "tool calls"],
  ["branches", "branches", "token sequences: more than one if an agent rewrote its history"],
  ["lag", "lag", "policy versions between its oldest token and the learner"],
  ["finish", "finish", "completed, truncated at a limit, or a demonstration"],
  ["source", "source", "the data source of its task"],
];
// The keys that choose a view of the tab. Other changes are drawn within the view.
const VIEW = ["run", "runs", "episode", "view"];

export function open(main, page) {
  let shown = null;
  let key = null;
  return {
    update(now) {
      const run = chosenRun(page, now);
      if (!run) {
        shown?.close();
        shown = key = null;
        fill(main, element("p", { class: "hint" }, "No run is shown."));
        return;
      }
      const wanted = JSON.stringify([run.key, ...VIEW.slice(2).map((name) => now[name] ?? "")]);
      if (wanted !== key) {
        shown?.close();
        key = wanted;
        const body = element("div", { class: "episode-view" });
        fill(main, element("div", { class: "episodes-tab" }, switcher(page, run, now), body));
        shown = now.episode ? openEpisode(body, run, now.episode) : now.view === "dead" ? openDeadLetters(body, run) : openTable(body, run);
      }
      shown.update(now);
    },
    close: () => shown?.close(),
  };
}

function chosenRun(page, now) {
  const runs = page.chosen();
  return runs.find((run) => run.key === now.run) ?? runs[0];
}

// The address of the table with a filter, for links from elsewhere.
export function tableLink(run, filter) {
  const none = Object.fromEntries([...FILTERS, "sort", "offset", "episode", "view"].map((name) => [name, null]));
  return link({ ...none, tab: "episodes", run, ...filter });
}

function switcher(page, run, now) {
  const runs = page.chosen();
  const view = now.view === "dead" ? "dead" : "kept";
  const views = [
    ["kept", "Kept episodes"],
    ["dead", "Dead letters"],
  ].map(([name, title]) =>
    element("a", { href: link({ view: name === "dead" ? "dead" : null, episode: null }), "aria-current": name === view && !now.episode ? "page" : null }, title),
  );
  const select = element(
    "select",
    { "aria-label": "run", onchange: (event) => change({ run: event.target.value, episode: null, offset: null }) },
    runs.map((each) => element("option", { value: each.key, selected: each === run }, ...nodesOf(each.name))),
  );
  return element("nav", { class: "subtabs", "aria-label": "Episodes" }, views, runs.length > 1 ? select : null);
}

function openTable(body, run) {
  const filters = element("form", { class: "filters", role: "search", "aria-label": "Filter episodes", onsubmit: (event) => event.preventDefault() });
  const summary = element("p", { class: "summary", role: "status" });
  const table = element("div", { class: "scrolling", tabindex: "0", role: "region", "aria-label": "Table of episodes" });
  const pager = element("nav", { class: "pager", "aria-label": "Pages" });
  fill(body, filters, summary, table, pager);
  const drawn = { choices: "", rows: "" };
  let asked = 0;
  let aborting = null;
  let loaded = "";

  async function load() {
    const now = state();
    asked += 1;
    const own = asked;
    aborting?.abort();
    aborting = new AbortController();
    const query = Object.fromEntries([...FILTERS, "sort", "offset"].map((name) => [name, now[name]]));
    try {
      const found = await api.ofRun(run.key, "episodes", { ...query, limit: PAGE_ROWS }, aborting.signal);
      if (own === asked) draw(found, now);
    } catch (error) {
      if (own !== asked || error.name === "AbortError") return;
      drawn.rows = "";
      fill(summary, ...nodesOf(error.message));
      if (!(error instanceof api.Refused)) return;
      fill(table);
      fill(pager);
      if (!drawn.choices) drawFilters(filters, { source: {}, tool: {}, finish: {}, flag: {} }, now);
    }
  }

  function draw(found, now) {
    const choices = JSON.stringify(found.choices);
    if (choices !== drawn.choices && !filters.contains(document.activeElement)) {
      drawn.choices = choices;
      drawFilters(filters, found.choices, now);
    }
    const rows = JSON.stringify([found.rows, found.matched, now]);
    if (rows === drawn.rows) return;
    drawn.rows = rows;
    fill(summary, sentence(found));
    fill(table, found.rows.length ? tableOf(run, found.rows, now) : null);
    fill(pager, pagerOf(found));
  }

  const timer = setInterval(() => document.hidden || load(), REFRESH_MS);
  return {
    update(now) {
      if (JSON.stringify(now) === loaded) return;
      loaded = JSON.stringify(now);
      syncFilters(filters, now);
      load();
    },
    close() {
      clearInterval(timer);
      aborting?.abort();
      asked += 1;
    },
  };
}

function sentence({ matched, choices }) {
  if (choices.total === 0) return "No episode is kept yet. Each learner step keeps some of its groups: observe.keep_episodes sets their number.";
  const [first, last] = choices.steps;
  const all = `${count(choices.total, "kept episode")} of steps ${number(first)} to ${number(last)}`;
  if (matched === choices.total) return all;
  return matched ? `${number(matched)} of ${all}` : `None of ${all} fits the filter`;
}

function tableOf(run, rows, now) {
  const sort = now.sort || "-step";
  const sorted = sort.replace(/^-/, "");
  const branched = rows.some((row) => row.branches > 1);
  const columns = COLUMNS.filter(([name]) => name !== "branches" || branched);
  const head = columns.map(([name, label, meaning]) => {
    const down = sort === `-${name}`;
    const order = name !== sorted ? "none" : down ? "descending" : "ascending";
    const next = name === sorted ? (down ? name : `-${name}`) : ["id", "source", "finish"].includes(name) ? name : `-${name}`;
    return element(
      "th",
      { scope: "col", "aria-sort": order, class: isNumber(name) ? "number" : null },
      element("a", { href: link({ sort: next === "-step" ? null : next, offset: null }), title: meaning }, label, name === sorted ? (down ? " \u2193" : " \u2191") : null),
    );
  });
  return element(
    "table",
    { class: "list" },
    element("thead", {}, element("tr", {}, head, element("th", { scope: "col" }, "flags"))),
    element("tbody", {}, rows.map((row) => tableRow(row, columns))),
  );
}

function isNumber(name) {
  return !["id", "finish", "source"].includes(name);
}

function tableRow(row, columns) {
  const address = link({ episode: `${row.step}/${row.id}` });
  const cells = columns.map(([name]) => {
    if (name === "id") return element("th", { scope: "row" }, element("a", { href: address, class: "id" }, ...nodesOf(row.id)));
    if (!isNumber(name)) return element("td", { class: `text ${name === "finish" && row.finish !== "completed" ? "bad" : ""}` }, ...nodesOf(row[name]));
    return element("td", { class: "number" }, number(row[name]));
  });
  const flags = row.flags.map((flag) => element("span", { class: `flag ${flag}` }, ...nodesOf(flag)));
  return element(
    "tr",
    {
      onclick(event) {
        if (!event.target.closest("a") && !String(getSelection())) location.hash = address;
      },
    },
    cells,
    element("td", { class: "flags" }, flags),
  );
}

function pagerOf({ matched, offset }) {
  if (matched <= PAGE_ROWS && !offset) return null;
  const last = Math.max(0, Math.floor((matched - 1) / PAGE_ROWS) * PAGE_ROWS);
  const to = (target, label) => {
    const here = target === offset || target < 0 || target > last;
    return element("a", { href: here ? null : link({ offset: target || null }), "aria-disabled": here ? "true" : null }, label);
  };
  const range = matched ? `${number(Math.min(offset + 1, matched))} to ${number(Math.min(offset + PAGE_ROWS, matched))} of ${number(matched)}` : "none";
  return [to(0, "First"), to(offset - PAGE_ROWS, "Previous"), element("span", {}, range), to(offset + PAGE_ROWS, "Next"), to(last, "Last")];
}
