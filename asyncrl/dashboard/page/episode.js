// One kept episode, turn by turn, with its group, its branches, its scores and its task.
//
// Keys of the state: `episode`, STEP/ID; `colour`, what tokens are coloured by; `turn`, the turn to show.

import * as api from "./api.js";
import { choices, colouring } from "./colours.js";
import { element, fill } from "./dom.js";
import { branchTree, commandList, judgement, recordTable, taskSection } from "./facts.js";
import { FILTERS } from "./filters.js";
import { groupSection, partings } from "./group.js";
import { change, link, state } from "./state.js";
import { nodesOf, number } from "./text.js";
import { openTurn } from "./turn.js";

const WIDE = "(min-width: 1000px)";

export function openEpisode(body, run, name) {
  const [step, id] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
  const path = `episodes/${encodeURIComponent(step)}/${encodeURIComponent(id)}`;
  const aborting = new AbortController();
  const around = element("nav", { class: "around", "aria-label": "Neighbours in the table" });
  let view = null;
  fill(body, element("p", { class: "hint", role: "status" }, "Reading the episode."));

  async function load() {
    try {
      const [episode, group] = await Promise.all([api.ofRun(run.key, path, {}, aborting.signal), api.ofRun(run.key, `${path}/group`, {}, aborting.signal)]);
      view = drawEpisode(body, around, { run, episode, group, more: (start) => api.ofRun(run.key, `${path}/tokens`, { start }, aborting.signal) });
      view.update(state());
      fill(around, neighbours(await api.ofRun(run.key, `${path}/neighbours`, filterOf(state()), aborting.signal)));
    } catch (error) {
      if (error.name === "AbortError") return;
      const problem = element("p", { class: "hint", role: "alert" }, ...nodesOf(error.message));
      if (view) fill(around, problem);
      else fill(body, element("p", {}, back()), problem);
    }
  }

  load();
  return {
    update: (now) => view?.update(now),
    close: () => aborting.abort(),
  };
}

function filterOf(now) {
  return Object.fromEntries([...FILTERS, "sort"].map((name) => [name, now[name]]));
}

function back() {
  return element("a", { href: link({ episode: null, turn: null }) }, "\u2190 All episodes");
}

function neighbours({ before, after, place, matched }) {
  const to = (row, label) =>
    element("a", { href: row ? link({ episode: `${row.step}/${row.id}`, turn: null }) : null, "aria-disabled": row ? null : "true", title: row ? row.id : null }, label);
  return [to(before, "\u2191 Previous"), element("span", {}, place === null ? "" : `${number(place + 1)} of ${number(matched)}`), to(after, "Next \u2193")];
}

function drawEpisode(body, around, { run, episode, group, more }) {
  const inspector = element("section", { class: "inspector card", "aria-live": "polite", "aria-label": "Token" });
  const point = (values) => showToken(inspector, values);
  const marks = partings(group, episode.id);
  const turns = episode.parts.map((part) => openTurn(part, { episode, marks, point, more }));
  const legend = element("div", { class: "swatches" });
  const bar = colourBar(episode, legend);
  const conversation = element("div", { class: "conversation" }, turns.map((turn) => turn.element));
  const goto = (token) => turns.find(({ part }) => part.start <= token && token < part.end)?.show(token);
  const side = element(
    "aside",
    { class: "side", "aria-label": "About the episode" },
    inspector,
    judgement(episode, goto),
    branchTree(episode, goto),
    taskSection(episode.task),
    recordTable(episode),
    commandList(episode.commands),
  );
  point(null);
  fill(
    body,
    element("div", { class: "crumbs" }, back(), stepLinks(episode), around),
    heading(episode),
    episode.vocabulary_problem ? element("p", { class: "problem" }, ...nodesOf(`Token ids instead of text: ${episode.vocabulary_problem}`)) : null,
    groupSection(group, episode),
    bar.element,
    element("div", { class: "reading" }, conversation, side),
  );
  let drawn = null;
  let turnShown = null;
  return {
    update(now) {
      const wanted = now.colour || "sampled";
      if (wanted !== drawn) {
        drawn = wanted;
        const colours = colouring(wanted, episode.scales, episode.scores);
        bar.show(colours);
        for (const turn of turns) turn.colour(colours);
      }
      if (now.turn && now.turn !== turnShown) turns.find(({ part }) => String(part.number) === now.turn)?.focus();
      turnShown = now.turn;
    },
  };
}

// Other places of the page that show the episode's step.
function stepLinks({ step }) {
  const [from, to] = [Math.max(0, step - 25), step + 25];
  return [
    element("a", { href: link({ episode: null, turn: null, step: String(step), offset: null }) }, `Step ${number(step)}`),
    element("a", { href: link({ tab: "figures", episode: null, turn: null, x: "step", range: `${from}..${to}` }) }, "in the figures"),
  ];
}

function heading(episode) {
  const facts = [
    ["reward", number(episode.reward)],
    ["outcome", number(episode.outcome)],
    ["advantage", episode.scales.advantage ? number(episode.scales.advantage.mean) : "\u2013"],
    ["tokens", `${number(episode.tokens)}, ${number(episode.sampled)} sampled${episode.masked ? `, ${number(episode.masked)} masked` : ""}`],
    ["turns", number(episode.turns)],
    ["tool calls", number(episode.tool_calls)],
    ["finish", episode.finish],
    ["lag", number(episode.lag)],
    ["version", number(episode.version)],
    ["source", episode.source],
  ];
  return element(
    "div",
    { class: "episode-head" },
    element("h2", {}, ...nodesOf(episode.id), " ", episode.flags.map((flag) => element("span", { class: `flag ${flag}` }, ...nodesOf(flag)))),
    element("dl", { class: "numbers" }, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, ...nodesOf(value))))),
  );
}

function colourBar(episode, legend) {
  const options = choices(episode.scales).map(({ name, label }) =>
    element("label", {}, element("input", { type: "radio", name: "colour", value: name, onchange: () => change({ colour: name === "sampled" ? null : name }, true) }), element("span", {}, label)),
  );
  const form = element("form", { class: "colours", "aria-label": "Colour tokens by" }, element("fieldset", {}, element("legend", {}, "Colour tokens by"), options), legend);
  return {
    element: form,
    show(colours) {
      for (const input of form.elements) if (input.type === "radio") input.checked = input.value === colours.name;
      const swatches = colours.legend.map(({ colour, text }) => {
        const swatch = element("span", { class: "swatch" }, ...nodesOf(text));
        swatch.style.backgroundColor = colour;
        return swatch;
      });
      fill(legend, swatches, element("span", { class: "meaning" }, colours.note || colours.meaning));
    },
  };
}

function showToken(inspector, values) {
  inspector.classList.toggle("empty", !values);
  if (!values) {
    fill(inspector, element("p", { class: "hint" }, matchMedia(WIDE).matches ? "Point at a token, or focus a turn and use the arrow keys, to see its values." : "Touch a token to see its values."));
    return;
  }
  fill(
    inspector,
    element("p", { class: "token-text" }, element("code", {}, values.text), element("span", { class: values.sampled ? "tag sampled" : "tag" }, values.sampled ? "sampled" : "given")),
    element("dl", { class: "values" }, values.rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
  );
}

