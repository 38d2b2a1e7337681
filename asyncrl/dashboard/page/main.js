// The frame of the page: its tabs, the runs, and the poll for what is new.
//
// A tab is a module with `open(main, page)`: it fills the element `main`, and returns an object with
//   update(state)   the state in the address has changed, or what is polled: draw again what differs
//   close()         another tab takes its place
// `page` has `runs()`, all runs as /api/runs tells them, and `chosen()`, those that are shown, in the order of colours.

import * as api from "./api.js";
import { element, fill, foreign } from "./dom.js";
import { change, link, onChange, state } from "./state.js";
import * as episodes from "./episodes.js";
import * as overview from "./overview.js";

const TABS = { overview: ["Overview", overview], episodes: ["Episodes", episodes] };
const POLL_MS = 2000;

const main = document.getElementById("main");
let runs = [];
let opened = null;

const page = {
  runs: () => runs,
  chosen() {
    const keys = state().runs?.split(",");
    return keys ? runs.filter((run) => keys.includes(run.key)) : runs;
  },
  colour: (run) => `var(--series-${1 + (runs.findIndex((each) => each.key === run.key) % 8)})`,
};

function showTabs(current) {
  const tabs = Object.entries(TABS).map(([name, [title]]) =>
    element("a", { href: link({ tab: name }), "aria-current": name === current ? "page" : null }, title));
  fill(document.getElementById("tabs"), tabs);
}

function showRuns() {
  const chosen = new Set(page.chosen().map((run) => run.key));
  const buttons = runs.map((run) => {
    const mark = element("span", { class: "mark", "aria-hidden": "true" });
    mark.style.background = page.colour(run);
    const toggle = () => {
      const keys = runs.map((each) => each.key).filter((key) => (key === run.key) !== chosen.has(key));
      change({ runs: keys.length === runs.length ? null : keys.join(",") || run.key });
    };
    const pressed = String(chosen.has(run.key));
    return element("button", { type: "button", class: "run", "aria-pressed": pressed, onclick: toggle },
      mark, foreign(run.name), element("span", { class: `state ${run.state}` }, run.state));
  });
  fill(document.getElementById("runs"), buttons);
}

function show() {
  const now = state();
  const name = now.tab in TABS ? now.tab : "overview";
  showTabs(name);
  showRuns();
  if (opened?.name !== name) {
    opened?.tab.close();
    fill(main);
    opened = { name, tab: TABS[name][1].open(main, page) };
  }
  opened.tab.update(now);
}

function tell(text) {
  const status = document.getElementById("status");
  if (status.textContent !== text) status.textContent = text;
}

async function poll() {
  if (!document.hidden || runs.length === 0) {
    try {
      const found = await api.get("runs");
      const changed = JSON.stringify(found) !== JSON.stringify(runs);
      runs = found;
      tell("");
      if (changed) show();
    } catch (error) {
      tell(error instanceof api.Refused ? error.message : "asyncrl dashboard has ended: start it again");
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
document.addEventListener("visibilitychange", () => document.hidden || show());
poll();
