// The tab of kept episodes: a table that the server filters, sorts and pages. If the state of the page names
// an episode, the tab shows that episode instead. With `view=dead` it shows the dead letters.
//
// Keys of the state: `run`, one of several that are shown; a filter by its name; `sort`; `rows`, "episodes" for a row for
// each of them instead of one for each group; `offset`; `episode`, STEP/ID; `view`; and those of an episode's page.

import * as api from "./api.js";
import { openDeadLetters } from "./dead.js";
import { element, fill } from "./dom.js";
import { openEpisode } from "./episode.js";
import { EpisodeTable } from "./list.js";
import { drawFilters, FILTERS, syncFilters } from "./filters.js";
import { change, link, state } from "./state.js";
import { count, nodesOf, number } from "./text.js";

const PAGE_ROWS = { groups: 40, episodes: 100 };
const REFRESH_MS = 4000;
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
  const none = Object.fromEntries([...FILTERS, "sort", "rows", "offset", "episode", "view"].map((name) => [name, null]));
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
  const kinds = element("nav", { class: "kinds", "aria-label": "Rows of the table" });
  const problem = element("p", { class: "problem" });
  const table = new EpisodeTable();
  const pager = element("nav", { class: "pager", "aria-label": "Pages" });
  fill(body, filters, element("div", { class: "summaries" }, summary, kinds), problem, table.element, pager);
  const drawn = { choices: "", rows: "" };
  let asked = 0;
  let aborting = null;
  let loaded = "";
  let timer = 0;
  let closed = false;

  async function load() {
    clearTimeout(timer);
    const now = state();
    asked += 1;
    const own = asked;
    aborting?.abort();
    aborting = new AbortController();
    const query = Object.fromEntries([...FILTERS, "sort", "offset"].map((name) => [name, now[name]]));
    const rows = rowsOf(now);
    let again = REFRESH_MS;
    try {
      const found = await api.ofRun(run.key, "episodes", { ...query, rows, limit: PAGE_ROWS[rows] }, aborting.signal);
      if (own === asked) draw(found, now);
      // The server reads texts for a part of a second at each request.
      if (found.search && !found.search.complete) again = 0;
    } catch (error) {
      if (own !== asked || error.name === "AbortError") return;
      drawn.rows = "";
      fill(summary, ...nodesOf(error.message));
      if (error instanceof api.Refused) {
        table.clear();
        fill(pager);
        if (!drawn.choices) drawFilters(filters, { source: {}, tool: {}, finish: {}, flag: {} }, now);
      }
    }
    if (own === asked && !closed) later(again);
  }

  function later(ms) {
    timer = setTimeout(() => (document.hidden ? later(REFRESH_MS) : load()), ms);
  }

  function draw(found, now) {
    const choices = JSON.stringify(found.choices);
    if (choices !== drawn.choices && !filters.contains(document.activeElement)) {
      drawn.choices = choices;
      drawFilters(filters, found.choices, now);
    }
    const rows = JSON.stringify([found.rows, found.matched, found.search, found.vocabulary_problem, now]);
    if (rows === drawn.rows) return;
    drawn.rows = rows;
    fill(summary, sentence(found));
    fill(kinds, ["groups", "episodes"].map((name) =>
      element("a", { href: link({ rows: name === "groups" ? null : name, offset: null }), "aria-current": name === rowsOf(now) ? "true" : null }, name === "groups" ? "A row for each group" : "for each episode")));
    fill(problem, found.vocabulary_problem ? ["No answers, since the tokenizer does not load: ", ...nodesOf(found.vocabulary_problem)] : null);
    table.draw(found.rows, now);
    fill(pager, pagerOf(found, rowsOf(now)));
  }

  return {
    update(now) {
      if (JSON.stringify(now) === loaded) return;
      loaded = JSON.stringify(now);
      syncFilters(filters, now);
      load();
    },
    close() {
      closed = true;
      clearTimeout(timer);
      aborting?.abort();
      asked += 1;
    },
  };
}

function rowsOf(now) {
  return now.rows === "episodes" ? "episodes" : "groups";
}

function sentence({ matched, groups, choices, search }) {
  if (choices.total === 0) return "No episode is kept yet. Each learner step keeps some of its groups: observe.keep_episodes sets their number.";
  const [first, last] = choices.steps;
  const all = `${count(choices.total, "kept episode")} of steps ${number(first)} to ${number(last)}`;
  const among = groups === undefined || groups === matched ? "" : `, in ${count(groups, "group")}`;
  const read = search && search.searched < search.of ? `. ${search.complete ? "Only" : "So far"} ${number(search.searched)} of ${number(search.of)} were searched` : "";
  if (matched === choices.total) return `${all}${among}${read}`;
  return matched ? `${number(matched)} of ${all}${among}${read}` : `None of ${all} fits the filter${read}`;
}

function pagerOf({ matched, groups, offset }, rows) {
  const [all, size] = [groups ?? matched, PAGE_ROWS[rows]];
  if (all <= size && !offset) return null;
  const last = Math.max(0, Math.floor((all - 1) / size) * size);
  const to = (target, label) => {
    const here = target === offset || target < 0 || target > last;
    return element("a", { href: here ? null : link({ offset: target || null }), "aria-disabled": here ? "true" : null }, label);
  };
  const range = all ? `${number(Math.min(offset + 1, all))} to ${number(Math.min(offset + size, all))} of ${number(all)}` : "none";
  return [to(0, "First"), to(offset - size, "Previous"), element("span", {}, range), to(offset + size, "Next"), to(last, "Last")];
}
