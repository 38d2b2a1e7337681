// The frame of the page: its tabs, the runs, and the poll for what is new.
//
// A tab is a module with `open(main, page)`: it fills the element `main`, and returns an object with
//   update(state)   the state in the address has changed, or what is polled: draw again what differs
//   recolour()      the colours have changed from light to dark or back; may be missing
//   close()         another tab takes its place
// `page` has
//   runs()      all runs in the answer of /api/runs; chosen(), the runs that are shown; toggle(key) adds or removes one
//   data        their metrics: series(run, file, names) and clock(run) return the rows that are read so far; the tab is
//               drawn again once there are more. changes(run): the changes of its configuration in mid-run
//   refresh()   read the metrics that were requested since
//   fail(error) show the error

import * as api from "./api.js";
import { CLOCK, Clock } from "./clock.js";
import { element, fill, foreign } from "./dom.js";
import * as episodes from "./episodes.js";
import * as figures from "./figures.js";
import * as overview from "./overview.js";
import * as runTable from "./runs.js";
import { Store } from "./series.js";
import { change, link, onChange, state } from "./state.js";

const TABS = { runs: ["Runs", runTable], overview: ["Overview", overview], figures: ["Figures", figures], episodes: ["Episodes", episodes] };
const POLL_MS = 2000;
const COLOURS = 8;
const MOST_AT_FIRST = 6;

const main = document.getElementById("main");
const store = new Store();
let runs = [];
let opened = null;
let starts = {};
const changes = {};

const page = {
  runs: () => runs,
  chosen() {
    const keys = state().runs?.split(",");
    const chosen = keys ? runs.filter((run) => keys.includes(run.key)) : [];
    return chosen.length ? chosen : atFirst();
  },
  toggle(key) {
    const chosen = new Set(page.chosen().map((run) => run.key));
    const keys = runs.map((each) => each.key).filter((each) => (each === key) !== chosen.has(each));
    change({ runs: keys.join(",") || key });
  },
  data: {
    series: (run, file, names) => store.want(run, file, names),
    clock(run) {
      const [learner] = store.want(run, "learner", CLOCK);
      return new Clock(learner, starts[run.key]);
    },
    colour(run) {
      // With more runs than colours, the runs that are shown have the colours.
      const among = runs.length > COLOURS ? page.chosen() : runs;
      return `var(--series-${1 + (Math.max(0, among.findIndex((each) => each.key === run.key)) % COLOURS)})`;
    },
    detail: (...words) => store.detail(...words),
    changes: (run) => changes[run.key]?.found ?? [],
  },
  async refresh() {
    if (!(await store.refresh(runs))) return false;
    for (const run of runs) starts[run.key] = store.firstTime(run.key);
    if (opened) {
      opened.tab.update(state());
      // Drawing may request more: for figures that were hidden, or runs that are chosen now.
      if (store.isMissing(runs)) await page.refresh();
    }
    return true;
  },
  fail(error) {
    tell(error instanceof api.Refused ? error.message : `this page failed: ${error.message}`);
    if (!(error instanceof api.Refused)) console.error(error);
  },
};

/** The runs that are shown until some are chosen: the running and the newest ones, without fine-tunings if there are other
 * runs, since these have no rewards. */
function atFirst() {
  const rl = runs.filter((run) => run.kind === "rl");
  const order = (one, other) => (other.state === "running") - (one.state === "running") || other.started - one.started;
  const first = new Set([...(rl.length ? rl : runs)].sort(order).slice(0, MOST_AT_FIRST));
  return runs.filter((run) => first.has(run));
}

function showTabs(current) {
  const tabs = Object.entries(TABS).filter(([name]) => name !== "runs" || runs.length > 1).map(([name, [title]]) =>
    element("a", { href: link({ tab: name }), "aria-current": name === current ? "page" : null }, title));
  fill(document.getElementById("tabs"), tabs);
}

function showRuns() {
  const chosen = page.chosen();
  const focused = document.activeElement?.dataset?.run;
  const listed = runs.length > COLOURS ? chosen.slice(0, COLOURS) : runs;
  const buttons = listed.map((run) => {
    const mark = element("span", { class: "mark", "aria-hidden": "true" });
    mark.style.background = runs.length > 1 ? page.data.colour(run) : "transparent";
    return element("button", { type: "button", class: "run", "aria-pressed": String(chosen.includes(run)), "data-run": run.key, onclick: () => page.toggle(run.key) },
      runs.length > 1 ? mark : null, foreign(run.name), element("span", { class: `state ${run.state}` }, run.state));
  });
  const all = runs.length > COLOURS ? element("a", { class: "all", href: link({ tab: "runs" }) }, `${chosen.length} of ${runs.length} runs`) : null;
  fill(document.getElementById("runs"), buttons, all);
  buttons.find((button) => button.dataset.run === focused)?.focus();
}

function show() {
  if (runs.length === 0) return;
  const now = state();
  const name = now.tab in TABS ? now.tab : runs.length > 1 ? "runs" : "overview";
  document.title = `${runs.map((run) => run.name).join(", ").slice(0, 60)} \u00b7 asyncrl`;
  document.body.dataset.tab = name;
  showTabs(name);
  showRuns();
  if (opened?.name !== name) {
    opened?.tab.close();
    fill(main);
    opened = { name, tab: TABS[name][1].open(main, page) };
  }
  opened.tab.update(now);
  page.refresh().catch(page.fail);
  readChanges().catch(page.fail);
}

function tell(text) {
  const status = document.getElementById("status");
  if (status.textContent !== text) status.textContent = text;
}

/** Reads the changes of the configuration of each run that is shown. A run has new ones only if it was resumed. */
async function readChanges() {
  const due = page.chosen().filter((run) => run.kind === "rl" && changes[run.key]?.state !== run.state);
  for (const run of due) changes[run.key] = { state: run.state, found: changes[run.key]?.found ?? [] };
  const found = await Promise.all(due.map((run) => api.ofRun(run.key, "changes")));
  due.forEach((run, index) => { changes[run.key].found = found[index]; });
  if (found.some((each) => each.length)) opened?.tab.update(state());
}

async function poll() {
  if (!document.hidden || runs.length === 0) {
    try {
      const found = await api.get("runs");
      tell("");
      if (JSON.stringify(found) !== JSON.stringify(runs)) {
        const first = runs.length === 0;
        const files = JSON.stringify(runs.map((run) => [run.state, Object.keys(run.files)]));
        runs = found;
        // Rows that were added are drawn by `refresh`; the frame only changes with the runs' states and files.
        if (first || files !== JSON.stringify(runs.map((run) => [run.state, Object.keys(run.files)]))) show();
        else await page.refresh();
      }
    } catch (error) {
      tell(error instanceof api.Refused ? error.message : "The page's server has ended. `asyncrl dashboard` starts it again.");
    }
  }
  setTimeout(poll, POLL_MS);
}

// The token is in a cookie by now; the address may be copied without it.
if (location.search) history.replaceState(null, "", location.pathname + location.hash);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
onChange(show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => opened?.tab.recolour?.());
poll();
