// The table of kept episodes: a row for each group, which opens to its members, or a row for each episode.

import { element, fill } from "./dom.js";
import { link } from "./state.js";
import { nodesOf, number } from "./text.js";

const COLUMNS = [
  ["step", "step", "the learner step that trained it"],
  ["id", "task and answer", "sorted by the ids of episodes"],
  ["reward", "reward", "the shaped reward that baselines compare"],
  ["outcome", "outcome", "the verifier's verdict"],
  ["sampled", "sampled", "tokens that the policy sampled"],
  ["masked", "masked", "sampled tokens that were too old to be trained"],
  ["tokens", "tokens", "all tokens"],
  ["turns", "turns", "turns of the policy"],
  ["tool_calls", "calls", "tool calls"],
  ["branches", "branches", "token sequences: more than one if an agent rewrote its history"],
  ["lag", "lag", "policy versions between its oldest token that is not masked and the learner"],
  ["finish", "finish", "completed, truncated at a limit, or a demonstration"],
  ["source", "source", "the data source of its task"],
];
const TEXTS = ["id", "finish", "source"];
const NEWEST_FIRST = "-step";
const MOST_BARS = 32;

export class EpisodeTable {
  #opened = new Set();
  #drawn = [[], {}];

  constructor() {
    this.element = element("div", { class: "scrolling", tabindex: "0", role: "region", "aria-label": "Table of episodes" });
  }

  clear() {
    fill(this.element);
  }

  /** Draws rows of groups, which have `members`, or of episodes. */
  draw(rows, now) {
    this.#drawn = [rows, now];
    const episodes = rows.flatMap((row) => row.members ?? [row]);
    const hidden = new Set(["branches", "masked", "source"].filter((name) => !isNeeded(name, episodes, now)));
    const columns = COLUMNS.filter(([name]) => !hidden.has(name));
    const bounds = [Math.min(0, ...rewardsOf(episodes)), Math.max(0, ...rewardsOf(episodes))];
    fill(this.element, rows.length
      ? element("table", { class: "list cards episodes" },
          element("thead", {}, element("tr", {}, columns.map((column) => headOf(column, now)), element("th", { scope: "col" }, "flags"))),
          element("tbody", {}, rows.flatMap((row) => (row.members ? this.#group(row, columns, bounds) : [episodeRow(row, columns)]))))
      : null);
  }

  #group(group, columns, bounds) {
    const { members } = group;
    if (members.length === 1 && group.size === 1) return [episodeRow(members[0], columns)];
    const key = `${group.step}/${group.group_id}`;
    const opened = this.#opened.has(key);
    const toggle = () => {
      if (!this.#opened.delete(key)) this.#opened.add(key);
      this.draw(...this.#drawn);
      [...this.element.querySelectorAll("[data-group]")].find((each) => each.dataset.group === key)?.focus();
    };
    const name = members.length < group.size ? `${members.length} of ${group.size} members` : `${group.size} members`;
    const button = element("button", { type: "button", class: "opener", "aria-expanded": String(opened), "data-group": key, onclick: toggle }, `${opened ? "\u25be" : "\u25b8"} ${name}`);
    const cells = columns.map(([column, label]) => {
      if (column === "id") return element("th", { scope: "row", class: "texts" }, taskOf(members[0]), button, opened ? null : extremes(members));
      if (column === "reward") return element("td", { class: "number", "data-label": label }, bars(members, bounds), number(group.reward, 3));
      if (column === "finish") return finishOf(members.filter((each) => each.finish !== "completed"), members.length);
      if (TEXTS.includes(column)) return element("td", { class: "text" }, ...nodesOf(group[column]));
      return element("td", { class: "number", "data-label": label }, number(group[column], 3));
    });
    const row = element("tr", { class: "group-row", onclick: (event) => event.target.closest("a, button") || String(getSelection()) || toggle() }, cells, flagsOf([...new Set(members.flatMap((each) => each.flags))]));
    return [row, ...(opened ? members.map((each) => episodeRow(each, columns, true)) : [])];
  }
}

/** Columns in which all rows are the same are left out, unless they are chosen. */
function isNeeded(name, episodes, now) {
  if ((now.sort ?? "").replace(/^-/, "") === name) return true;
  if (name === "masked") return episodes.some((each) => each.masked);
  return name === "branches" ? episodes.some((each) => each.branches > 1) : new Set(episodes.map((each) => each.source)).size > 1;
}

function rewardsOf(episodes) {
  return episodes.map((each) => each.reward).filter((each) => typeof each === "number");
}

function headOf([name, label, meaning], now) {
  const sort = now.sort || NEWEST_FIRST;
  const sorted = sort.replace(/^-/, "");
  const down = sort === `-${name}`;
  const order = name !== sorted ? "none" : down ? "descending" : "ascending";
  const next = name === sorted ? (down ? name : `-${name}`) : TEXTS.includes(name) ? name : `-${name}`;
  return element("th", { scope: "col", "aria-sort": order, class: TEXTS.includes(name) ? null : "number" },
    element("a", { href: link({ sort: next === NEWEST_FIRST ? null : next, offset: null }), title: meaning }, label, name === sorted ? (down ? " \u2193" : " \u2191") : null));
}

function taskOf({ task, truth, task_id: id }) {
  return element("span", { class: "task" }, ...nodesOf(task || id), truth ? element("span", { class: "truth", title: "ground truth" }, "\u2192 ", ...nodesOf(truth)) : null);
}

/** The answers of the members with the largest and with the smallest reward. */
function extremes(members) {
  const known = members.filter((each) => each.answer && typeof each.reward === "number");
  if (!known.length) return null;
  const [best, worst] = [(one, two) => two.reward > one.reward, (one, two) => two.reward < one.reward].map((better) => known.reduce((one, two) => (better(one, two) ? two : one)));
  return (best.reward === worst.reward ? [best] : [best, worst]).map((each) =>
    element("span", { class: "answer" }, element("span", { class: "number" }, number(each.reward, 3)), " ", ...nodesOf(each.answer)));
}

/** A bar for the reward of each member. */
function bars(members, [low, high]) {
  if (high === low || members.length > MOST_BARS) return null;
  return element("span", { class: "strip", "aria-hidden": "true" }, members.map(({ reward }) => {
    const bar = element("span", { class: reward < 0 ? "negative" : null });
    bar.style.height = typeof reward === "number" ? `${Math.max(8, (100 * Math.abs(reward)) / Math.max(high, -low))}%` : "0";
    return bar;
  }));
}

/** How episodes ended that were not completed: `others` of `all`. */
function finishOf(others, all) {
  if (others.length === 0) return element("td", { class: "text" }, "completed");
  const names = [...new Set(others.map((each) => each.finish))].join(", ");
  return element("td", { class: "text bad" }, others.length < all ? `${others.length} ` : null, ...nodesOf(names));
}

function flagsOf(flags) {
  return element("td", { class: "flags" }, flags.map((flag) => element("span", { class: `flag ${flag}` }, ...nodesOf(flag))));
}

function episodeRow(row, columns, isMember = false) {
  const address = link({ episode: `${row.step}/${row.id}` });
  const cells = columns.map(([name, label]) => {
    if (name === "id") {
      const id = element("a", { href: address, class: "id" }, ...nodesOf(row.id));
      const answer = row.answer ? element("span", { class: "answer" }, ...nodesOf(row.answer)) : null;
      return element("th", { scope: "row", class: "texts" }, isMember ? null : taskOf(row), element("span", { class: "played" }, id, answer));
    }
    if (name === "step" && isMember) return element("td", {});
    if (name === "finish") return finishOf(row.finish === "completed" ? [] : [row], 1);
    if (TEXTS.includes(name)) return element("td", { class: "text" }, ...nodesOf(row[name]));
    return element("td", { class: "number", "data-label": label }, number(row[name]));
  });
  const go = (event) => {
    if (!event.target.closest("a") && !String(getSelection())) location.hash = address;
  };
  return element("tr", { class: isMember ? "member-row" : null, onclick: go }, cells, flagsOf(row.flags));
}
