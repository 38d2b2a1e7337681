// The tab that compares all runs: a table of reinforcement learning runs, and one of fine-tunings, filtered by a text and
// sorted by a column.
//
// Keys of the state: `find`, words that a row must have; `by`, the column that sorts, with a minus for the largest first.

import * as api from "./api.js";
import { element, fill, foreign } from "./dom.js";
import { number, value } from "./format.js";
import { change, link, state } from "./state.js";
import { count } from "./text.js";

const REFRESH_MS = 4000;
const MOST_DIFFERENCES = 6;
const MOST_DRAWN = 24;
const NEWEST_FIRST = "-changed";
const last = (name) => (row) => row.results[name]?.[1];
const chosen = (name) => (row) => row.configuration[name];
const algorithm = (row) => ["advantage", "loss"].map((part) => row.configuration[`algorithm.${part}.name`]).filter(Boolean).join(", ");
const differing = (row) => Object.entries(row.differs);

/** Each column: its name, title, meaning, and the value that sorts and that is searched. */
const NAME = ["name", "run", "its name leads to its overview", (row) => row.name];
const STATE = ["state", "state", "running, or the result with which it ended", (row) => row.state];
const STEP = ["step", "steps", "trained steps, and planned ones", (row) => row.step];
const LR = ["lr", "lr", "learner.lr", (row) => Number(chosen("learner.lr")(row))];
const DIFFERS = ["differs", "what differs", "keys in which the runs differ, except for the value that most of the runs have", (row) => differing(row).flat().join(" ")];
const CHANGED = ["changed", "newest row", "the time of its newest row of metrics", (row) => row.changed];
const KINDS = [
  ["rl", "Runs", [NAME, STATE, STEP,
    ["reward", "reward", "mean reward of the first and of the newest steps", last("reward")],
    ["accuracy", "held-out accuracy", "of the first and of the newest evaluation", last("accuracy"), "share"],
    ["outcome", "held-out outcome", "of the first and of the newest evaluation", last("outcome")],
    LR, ["algorithm", "algorithm", "algorithm.advantage and algorithm.loss", algorithm], DIFFERS, CHANGED]],
  ["sft", "Fine-tunings", [NAME, STATE, STEP,
    ["loss", "loss", "mean loss of the first and of the newest steps, in nats", last("loss")],
    ["held_out_loss", "held-out loss", "of the first and of the newest evaluation, in nats", last("held_out_loss")],
    LR, ["model", "model", "model.path", chosen("model.path")], DIFFERS, CHANGED]],
];
const NUMBERS = ["step", "reward", "accuracy", "outcome", "loss", "held_out_loss", "lr", "changed"];

export function open(main, page) {
  const search = element("input", { type: "search", placeholder: "name, state, algorithm, key=value", "aria-label": "Filter the runs",
    oninput: (event) => change({ find: event.target.value }, true) });
  const summary = element("p", { class: "about", role: "status" });
  const figures = element("button", { type: "button", onclick: () => showAll() });
  const tables = element("div");
  fill(main, element("div", { class: "runs-tab" }, element("div", { class: "toolbar" }, element("label", {}, "Filter", search), figures, summary), tables));
  let found = { rows: [], complete: false };
  let timer = 0;
  let closed = false;
  let drawn = "";

  async function load() {
    clearTimeout(timer);
    try {
      found = await api.get("table");
      draw(state());
    } catch (error) {
      page.fail(error);
    }
    // A look at many runs takes several requests.
    if (!closed) timer = setTimeout(() => (document.hidden ? later() : load()), found.complete ? REFRESH_MS : 0);
  }
  const later = () => { timer = setTimeout(load, REFRESH_MS); };

  function fitting(now) {
    const words = (now.find ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    return found.rows.filter((row) => words.every((word) => textOf(row).includes(word)));
  }

  function showAll() {
    change({ runs: fitting(state()).map((row) => row.key).join(","), tab: "figures" });
  }

  function draw(now) {
    const rows = fitting(now);
    const picked = new Set(page.chosen().map((run) => run.key));
    const shown = JSON.stringify([rows, found.complete, now, [...picked]]);
    if (shown === drawn || closed) return;
    drawn = shown;
    if (document.activeElement !== search) search.value = now.find ?? "";
    const all = count(found.rows.length, "run");
    fill(summary, `${rows.length === found.rows.length ? all : `${number(rows.length)} of ${all}`}${found.complete ? "" : ", reading the others\u2026"}`);
    figures.disabled = rows.length === 0 || rows.length > MOST_DRAWN;
    figures.title = rows.length > MOST_DRAWN ? `Filter to at most ${MOST_DRAWN} runs, or choose some` : "";
    fill(figures, `Figures of ${rows.length === 1 ? "this run" : `these ${number(rows.length)}`}`);
    const focused = document.activeElement?.dataset?.pick;
    fill(tables, KINDS.map(([kind, title, columns]) => {
      const of = rows.filter((row) => row.kind === kind);
      return of.length ? [element("h2", {}, title), tableOf(title, columns.filter(([name]) => isNeeded(name, of)), of, now, picked, page)] : null;
    }).flat());
    if (focused) tables.querySelector(`[data-pick="${focused}"]`)?.focus();
  }

  load();
  return {
    update: draw,
    close() {
      closed = true;
      clearTimeout(timer);
    },
  };
}

/** The text of a row that is searched, in lower case. */
function textOf(row) {
  const differs = differing(row).map(([key, text]) => `${key}=${text}`);
  return [row.name, row.state, row.kind, algorithm(row), ...Object.values(row.configuration), ...differs].join(" ").toLowerCase();
}

/** Outcomes of 0 and 1 have a mean that is the accuracy, so one column is enough. */
function isNeeded(name, rows) {
  return name !== "outcome" || rows.some(({ results }) => results.outcome && String(results.outcome) !== String(results.accuracy));
}

function tableOf(title, columns, rows, now, picked, page) {
  const by = now.by || NEWEST_FIRST;
  const [name, down] = [by.replace(/^-/, ""), by.startsWith("-")];
  const column = columns.find(([each]) => each === name) ?? CHANGED;
  const head = columns.map(([each, label, meaning]) => {
    const next = each === name ? (down ? each : `-${each}`) : NUMBERS.includes(each) ? `-${each}` : each;
    const order = each !== name ? "none" : down ? "descending" : "ascending";
    return element("th", { scope: "col", "aria-sort": order, class: NUMBERS.includes(each) ? "number" : null },
      element("a", { href: link({ by: next === NEWEST_FIRST ? null : next }), title: meaning }, label, each === name ? (down ? " \u2193" : " \u2191") : null));
  });
  return element("div", { class: "scrolling", tabindex: "0", role: "region", "aria-label": title },
    element("table", { class: "list cards runs" },
      element("thead", {}, element("tr", {}, element("th", { scope: "col", title: "Shown in overview, figures and episodes" }, "show"), head)),
      element("tbody", {}, sorted(rows, column[3], down).map((row) => rowOf(row, columns, picked, page)))));
}

function sorted(rows, of, down) {
  const missing = (row) => { const found = of(row); return found === undefined || found === "" || Number.isNaN(found); };
  const order = (one, other) => {
    if (missing(one) !== missing(other)) return missing(one) - missing(other);
    const [left, right] = [of(one), of(other)];
    const difference = typeof left === "number" ? left - right : String(left ?? "").localeCompare(String(right ?? ""), "en", { numeric: true });
    return (down ? -difference : difference) || one.name.localeCompare(other.name, "en", { numeric: true });
  };
  return [...rows].sort(order);
}

function rowOf(row, columns, picked, page) {
  const mark = element("span", { class: "mark", "aria-hidden": "true" });
  const run = page.runs().find((each) => each.key === row.key);
  mark.style.background = run && picked.has(row.key) ? page.data.colour(run) : "transparent";
  const pick = element("input", { type: "checkbox", checked: picked.has(row.key), "data-pick": row.key, "aria-label": `Show ${row.name}`, onchange: () => page.toggle(row.key) });
  return element("tr", {}, element("td", { class: "pick" }, element("label", {}, pick, mark)), columns.map((column) => cellOf(row, column)));
}

function cellOf(row, [name, label, , of, unit = ""]) {
  if (name === "name") return element("th", { scope: "row", class: "name" }, element("a", { href: link({ tab: "overview", runs: row.key }) }, foreign(row.name)));
  if (name === "state") return element("td", {}, element("span", { class: `state ${row.state}` }, row.state));
  if (name === "step") return element("td", { class: "number", "data-label": label }, number(row.step), row.steps ? element("small", {}, ` of ${number(row.steps)}`) : null);
  if (name === "changed") return element("td", { class: "number", "data-label": label }, row.changed ? moment(row.changed) : "\u2013");
  if (name === "differs") return element("td", { class: "differs" }, differencesOf(row));
  if (name in row.results) {
    const [first, newest] = row.results[name];
    return element("td", { class: "number", "data-label": label }, element("small", {}, `${value(first, unit)} \u2192 `), value(newest, unit));
  }
  if (name === "lr") return element("td", { class: "number", "data-label": label }, foreign(row.configuration["learner.lr"] ?? "\u2013"));
  if (NUMBERS.includes(name)) return element("td", { class: "number" });
  return element("td", { class: "text" }, foreign(of(row) ?? ""));
}

function differencesOf(row) {
  const pairs = differing(row).map(([key, text]) => element("span", { class: "pair" }, element("span", { class: "key" }, foreign(key), "="), foreign(text)));
  const rest = pairs.slice(MOST_DIFFERENCES);
  if (rest.length < 2) return pairs;
  return [...pairs.slice(0, MOST_DIFFERENCES), element("details", {}, element("summary", {}, `${number(rest.length)} more`), rest)];
}

function moment(seconds) {
  const at = new Date(1000 * seconds);
  const day = at.toDateString() === new Date().toDateString() ? {} : { day: "numeric", month: "short" };
  return at.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
}
