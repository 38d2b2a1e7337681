// One turn of an episode: a heading, its tokens, and its tool calls or results formatted. Long turns are folded.

import { element, fill } from "./dom.js";
import { link } from "./state.js";
import { count, nodesOf, number } from "./text.js";
import { TokenBlock } from "./tokens.js";

const LONG = { prompt: 250, tool: 250, template: 60, assistant: 1500 };
const BLANK = /^\s*$/;

// `more(start)` gives further tokens. The result has `element`, `colour(colouring)`, `show(token)` and `focus()`.
export function openTurn(part, { episode, marks, point, more }) {
  const block = new TokenBlock(part, { scores: episode.scores, marks, onpoint: point });
  const folded = element("div", { class: "folded" }, block.element);
  const foot = element("div", { class: "turn-foot" });
  const formatted = element("div", { class: "formatted" });
  const { section, heading } = frame(part, episode);
  section.append(folded, foot, formatted);
  let open = part.end - part.start <= (LONG[part.role] ?? LONG.tool);
  let loading = false;
  drawFoot();
  fill(formatted, ...(part.calls ?? []).map(toolCall), ...results(part));

  function drawFoot() {
    folded.classList.toggle("closed", !open);
    const left = part.end - block.end;
    const fold = element("button", { type: "button", "aria-expanded": String(open), onclick: () => setOpen(!open) }, open ? "Fold" : `Unfold ${count(part.end - part.start, "token")}`);
    const further = element("button", { type: "button", disabled: loading, onclick: loadMore }, `Show ${number(Math.min(left, 1200))} more of ${count(left, "token")} not shown`);
    fill(foot, isLong() ? fold : null, left > 0 && open ? further : null);
  }

  function isLong() {
    return part.end - part.start > (LONG[part.role] ?? LONG.tool);
  }

  function setOpen(wanted) {
    open = wanted;
    drawFoot();
    if (open && block.end === part.start) loadMore();
  }

  async function loadMore() {
    loading = true;
    drawFoot();
    try {
      block.extend(await more(block.end));
    } catch (error) {
      if (error.name !== "AbortError") fill(formatted, element("p", { class: "problem" }, ...nodesOf(error.message)));
    }
    loading = false;
    drawFoot();
  }

  return {
    part,
    element: section,
    colour: (colours) => block.colour(colours),
    show(token) {
      setOpen(true);
      if (token < block.end) {
        block.element.focus({ preventScroll: true });
        block.walkTo(token - part.start);
      } else {
        this.focus();
      }
    },
    focus() {
      section.scrollIntoView({ block: "start" });
      heading.focus({ preventScroll: true });
    },
  };
}

function frame(part, episode) {
  const branches = episode.branch_list;
  const begins = branches.length > 1 && branches.some((each) => each.start === part.start);
  const versions = Object.entries(part.versions ?? {}).map(([version, tokens]) => (Object.keys(part.versions).length > 1 ? `${number(tokens)} by version ${version}` : `version ${version}`));
  const facts = [
    count(part.end - part.start, "token"),
    ...versions,
    part.finish_reason,
    part.grammar ? `grammar ${part.grammar}${part.mass === null ? "" : `, mass ${number(part.mass, 2)}`}` : "",
    part.score === null || part.score === undefined ? "" : `score ${number(part.score, 3)}`,
  ].filter(Boolean);
  const place = part.number === undefined ? null : element("a", { class: "place", href: link({ turn: String(part.number) }), title: "a link to this turn" }, `#${part.number}`);
  const heading = element("h3", { tabindex: "-1" }, element("span", { class: "role" }, part.role), place, element("span", { class: "turn-facts" }, ...nodesOf(facts.join(" \u00b7 "))));
  const section = element("section", { class: `turn ${part.role}` }, begins ? branchRule(part, branches) : null, heading);
  return { section, heading };
}

function branchRule(part, branches) {
  const { parent, shared } = branches[part.branch];
  const from = parent === null ? "" : `: its first ${count(shared, "token")} are as in branch ${parent}`;
  return element("p", { class: "branch-rule" }, `Branch ${part.branch}${from}`);
}

function toolCall({ name, arguments: given }) {
  return element("div", { class: "call" }, element("p", { class: "call-name" }, "calls ", element("code", {}, ...nodesOf(name))), argumentList(given));
}

// Arguments by name if they are complete: texts of several lines unchanged, and everything else as JSON.
function argumentList({ text, more }) {
  const values = more ? null : parsed(text);
  if (values === null || typeof values !== "object" || Array.isArray(values)) return cutText(text, more);
  const rows = Object.entries(values).map(([name, value]) => {
    const shown = typeof value === "string" ? value : JSON.stringify(value, null, 2);
    return element("div", {}, element("dt", {}, ...nodesOf(name)), element("dd", {}, element("pre", {}, ...nodesOf(shown))));
  });
  return element("dl", { class: "arguments" }, rows);
}

export function cutText(text, more) {
  return element("pre", {}, ...nodesOf(text), more ? element("span", { class: "missing" }, ` \u2026 ${count(more, "character")} more`) : null);
}

// The JSON values among the results of tools, indented.
function results(part) {
  if (part.role !== "tool" || part.tokens.start + part.tokens.ids.length < part.end) return [];
  const text = part.tokens.pieces.join("");
  const between = [...text.matchAll(/<tool_response>([\s\S]*?)<\/tool_response>/g)].map((match) => match[1]);
  return (between.length ? between : [text])
    .filter((each) => !BLANK.test(each))
    .map(parsed)
    .filter((value) => value !== null && typeof value === "object")
    .map((value) => element("details", { class: "call", open: true }, element("summary", {}, "the result as JSON"), element("pre", {}, ...nodesOf(JSON.stringify(value, null, 2)))));
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
