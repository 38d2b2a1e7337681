// The members of a group side by side, and the tokens at which they begin to differ.

import { element } from "./dom.js";
import { link } from "./state.js";
import { count, nodesOf, number } from "./text.js";

// For each token of the episode at which other members begin to differ, the text that names them.
export function partings({ members }, id) {
  const found = new Map();
  for (const each of members) {
    if (each.id !== id) found.set(each.same, [...(found.get(each.same) ?? []), each.member]);
  }
  const text = (numbers) => (numbers.length > 1 ? `members ${numbers.join(", ")} differ from here on` : `member ${numbers[0]} differs from here on`);
  return new Map([...found].map(([token, numbers]) => [token, text(numbers)]));
}

export function groupSection({ members, common }, episode) {
  if (members.length < 2) return null;
  const rewards = members.map((each) => each.reward).filter((each) => typeof each === "number");
  const [low, high] = [Math.min(0, ...rewards), Math.max(0, ...rewards)];
  return element(
    "details",
    { class: "group", open: true },
    element("summary", {}, "Group ", ...nodesOf(episode.group_id), `: ${count(members.length, "member")}, identical in the first ${count(common, "token")}`),
    element("div", { class: "members" }, members.map((each) => card(each, episode, low, high))),
  );
}

function card(member, episode, low, high) {
  const chosen = member.id === episode.id;
  const facts = [
    ["reward", number(member.reward, 3)],
    ["advantage", `${number(member.advantage, 3)}${member.advantages_differ ? " on average" : ""}`],
    ["sampled", number(member.sampled)],
    ["turns", number(member.turns)],
  ];
  return element(
    "a",
    { class: chosen ? "member chosen" : "member", href: link({ episode: `${member.step}/${member.id}`, turn: null }), "aria-current": chosen ? "true" : null },
    element("span", { class: "member-name" }, element("strong", {}, `member ${member.member}`), element("span", { class: member.finish === "completed" ? "" : "bad" }, ...nodesOf(member.finish))),
    rewardBar(member.reward, low, high),
    element("span", { class: "member-facts" }, facts.map(([name, value]) => element("span", {}, element("small", {}, name), " ", ...nodesOf(value)))),
    element("span", { class: "excerpt" }, element("span", { class: "same", title: "as in this episode" }, ...nodesOf(lastLine(member.before))), element("mark", {}, ...nodesOf(member.after))),
    element("span", { class: "excerpt last", title: "the end of its last turn" }, ...nodesOf(`\u2026${member.last}`)),
  );
}

// A bar from zero to the reward, on the scale of the group.
function rewardBar(reward, low, high) {
  const bar = element("span", { class: "bar", "aria-hidden": "true" });
  if (typeof reward !== "number" || high === low) return bar;
  const filled = element("span", { class: reward < 0 ? "filled negative" : "filled" });
  filled.style.left = `${(100 * (Math.min(0, reward) - low)) / (high - low)}%`;
  filled.style.width = `${(100 * Math.abs(reward)) / (high - low)}%`;
  bar.append(filled);
  return bar;
}

// The last line of a text. The lines above it are mostly the template's.
function lastLine(text) {
  return text.slice(text.lastIndexOf("\n") + 1);
}
