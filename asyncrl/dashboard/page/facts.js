// The facts about an episode in addition to its tokens: scores, branches, the task, the replay's record.

import { element, fill } from "./dom.js";
import { count, nodesOf, number } from "./text.js";
import { cutText } from "./turn.js";

const RECORD = { state: "state", reason: "reason", plans: "planned", last_plan: "last planned for step", trained: "trained", attempts: "attempts at scoring", seconds: "seconds" };

function card(title, ...children) {
  return element("section", { class: "card" }, element("h3", {}, title), ...children);
}

function table(rows) {
  return element("table", { class: "pairs" }, element("tbody", {}, rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, ...nodesOf(name)), element("td", {}, ...nodesOf(value))))));
}

// The results of the verifier and of each scorer. `goto(token)` shows a token.
export function judgement({ labels, rewards, scores }, goto) {
  const rows = [
    ["reward", number(labels.reward)],
    ["outcome", number(labels.outcome)],
    ["judged by", labels.scorer],
    ...(labels.vote.text ? [["answer in short", labels.vote.text]] : []),
    ...labels.reasons.map(({ scorer, text }) => [`${scorer} says`, text]),
    ...Object.entries(labels.extra).map(([name, value]) => [name, number(value)]),
    ...Object.entries(rewards).map(([name, value]) => [`from the environment: ${name}`, number(value)]),
  ];
  return card("Judged", table(rows), scores.length ? stepScores(scores, goto) : null);
}

function stepScores(scores, goto) {
  const values = scores.map((each) => each.score).filter((each) => typeof each === "number");
  const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
  const items = scores.map(({ start, end, score }, place) => {
    const bar = element("span", { class: "bar", "aria-hidden": "true" }, element("span", { class: "filled" }));
    bar.firstChild.style.width = typeof score === "number" ? `${(100 * (score - low)) / (high - low)}%` : "0";
    return element("li", {}, element("button", { type: "button", class: "step-score", title: `tokens ${start} to ${end - 1}`, onclick: () => goto(start) }, `step ${place}`, bar, element("span", { class: "number" }, number(score, 3))));
  });
  return element("ol", { class: "step-scores", "aria-label": "Step scores" }, items);
}

// The tree of branches: each is below the branch whose beginning it shares.
export function branchTree({ branch_list: branches, reward }, goto) {
  if (branches.length < 2) return null;
  const longest = Math.max(...branches.map((each) => each.end - each.start));
  const below = (parent) => {
    const items = branches.map((each, place) => ({ ...each, place })).filter((each) => each.parent === parent);
    return items.length ? element("ul", { class: "tree" }, items.map((each) => element("li", {}, branch(each, longest, goto), below(each.place)))) : null;
  };
  return card(`${branches.length} branches`, element("p", { class: "hint" }, `The agent rewrote its history. All branches share the reward ${number(reward)}.`), below(null));
}

function branch({ place, start, end, shared, parent, sampled, turns, score }, longest, goto) {
  const bar = element("span", { class: "bar branch-bar", "aria-hidden": "true" }, element("span", { class: "shared" }), element("span", { class: "filled" }));
  bar.firstChild.style.width = `${(100 * shared) / longest}%`;
  bar.lastChild.style.width = `${(100 * (end - start - shared)) / longest}%`;
  const facts = [
    parent === null ? count(end - start, "token") : `${count(shared, "token")} as in branch ${parent}, then ${number(end - start - shared)} more`,
    `${number(sampled)} sampled in ${count(turns, "turn")}`,
    score === null ? "" : `step score ${number(score, 3)}`,
  ].filter(Boolean);
  return element("button", { type: "button", class: "branch", onclick: () => goto(start) }, element("strong", {}, `branch ${place}`), bar, element("small", {}, facts.join(" \u00b7 ")));
}

export function taskSection(task) {
  if (!task) return card("Task", element("p", { class: "hint" }, "The run's data does not have this task."));
  const folded = (title, value) => (value ? element("details", {}, element("summary", {}, title), cutText(value.text, value.more)) : null);
  return card(
    "Task",
    table([
      ["id", task.id],
      ["source", task.data_source],
    ]),
    element("h4", {}, "Ground truth"),
    cutText(task.ground_truth.text, task.ground_truth.more),
    element("details", {}, element("summary", {}, count(task.messages.length, "message")), task.messages.map(message)),
    folded("Tools", task.tools),
    folded("Extra info", task.extra_info),
  );
}

function message({ role, content, rest }) {
  return element("div", { class: "message" }, element("h4", {}, ...nodesOf(role)), cutText(content.text, content.more), rest ? cutText(rest.text, rest.more) : null);
}

// The replay's record, and the times of the parts of the episode.
export function recordTable({ record, timings }) {
  const rows = [
    ...Object.entries(timings).map(([name, seconds]) => [`seconds: ${name}`, number(seconds, 3)]),
    ...(record ? Object.entries(RECORD).filter(([name]) => record[name] !== "").map(([name, label]) => [label, number(record[name])]) : []),
  ];
  return rows.length ? card("Played", table(rows)) : null;
}

export function commandList(commands) {
  const rows = Object.entries(commands).map(([meaning, command]) => {
    const copied = element("span", { role: "status" });
    const copy = async () => {
      try {
        await navigator.clipboard.writeText(command);
        fill(copied, " copied");
      } catch {
        fill(copied, " select the text and copy it");
      }
    };
    return element("div", { class: "command" }, element("span", {}, meaning), copied, element("pre", {}, ...nodesOf(command)), element("button", { type: "button", onclick: copy }, "Copy"));
  });
  return card("On a terminal", rows);
}
