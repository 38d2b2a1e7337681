// The tab for one look at a run: is it learning, is it healthy, where does the time go.

import * as api from "./api.js";
import { FIGURES } from "./catalogue.js";
import { element, fill, foreign } from "./dom.js";
import { viewOf } from "./figures.js";
import { duration, number, value } from "./format.js";
import { Panel } from "./panel.js";
import { link, state } from "./state.js";
import { count } from "./text.js";

const REFRESH_MS = 4000;
const PARTS = [
  ["Is it learning?", ["reward", "accuracy"]],
  ["Is it healthy?", ["entropy", "mismatch"]],
  ["Where does the time go?", ["idle", "phases"]],
];
const FINE_TUNING_PARTS = [
  ["Is it learning?", ["demonstrations", "lr"]],
  ["Is it healthy?", ["gradient", "memory"]],
  ["Where does the time go?", ["phases", "speed"]],
];
const LOSSES = [["loss", "learner", "sft/loss"], ["held-out loss", "evaluation", "eval/loss"]];
const READ = { learner: ["lag/max", "entropy"] };
const SMALL = { height: 130 };

export function open(main, page) {
  let cards = new Map();
  let asked = "";
  let timer = 0;
  let closed = false;

  async function read() {
    const answers = await Promise.allSettled([...cards.values()].map((card) => card.read()));
    for (const { reason } of answers) if (reason) page.fail(reason);
    clearTimeout(timer);
    // A refused request is repeated: a file may have been written at that moment.
    if (!closed && answers.some((each) => each.reason || each.value)) timer = setTimeout(() => (document.hidden ? tick() : read().catch(page.fail)), REFRESH_MS);
  }
  const tick = () => { timer = setTimeout(() => read().catch(page.fail), REFRESH_MS); };

  return {
    update(now) {
      const runs = [...page.chosen()].sort((one, other) => (other.state === "running") - (one.state === "running"));
      if (runs.map((run) => run.key).join() !== [...cards.keys()].join()) {
        for (const card of cards.values()) card.close();
        cards = new Map(runs.map((run) => [run.key, new Card(run, page)]));
        fill(main, [...cards.values()].map((card) => card.element));
      }
      // A run that has ended is not read again until somebody resumes it.
      const states = runs.map((run) => `${run.key} ${run.state}`).join();
      if (states !== asked) read().catch(page.fail);
      asked = states;
      for (const run of runs) cards.get(run.key).draw(run, viewOf({ x: now.x }));
    },
    recolour: () => cards.forEach((card) => card.recolour()),
    close() {
      closed = true;
      clearTimeout(timer);
      cards.forEach((card) => card.close());
    },
  };
}

/** The card of one run. */
class Card {
  constructor(run, page) {
    Object.assign(this, { run, page, told: null });
    this.facts = element("dl", { class: "facts" });
    this.progress = element("div", { class: "progress", role: "progressbar", "aria-label": "learner steps" }, element("span"));
    const shown = run.kind === "sft" ? FINE_TUNING_PARTS : PARTS;
    this.words = shown.map(() => element("div", { class: "words" }));
    this.roles = element("div");
    this.panels = shown.map(([, ids]) => ids.map((id) => new Panel(FIGURES.find((figure) => figure.id === id), { kind: run.kind, tools: [figureLink(id)], chart: SMALL, tellsChanges: false })));
    const parts = shown.map(([title], index) => element("section", { class: "part" }, element("h3", {}, title), this.words[index],
      this.panels[index].map((panel) => panel.element)));
    this.configuration = element("dl", { class: "choices" });
    this.element = element("section", { class: "overview", "aria-label": run.name },
      element("h2", {}, foreign(run.name)), this.progress, this.facts, element("div", { class: "parts" }, parts),
      element("div", { class: "below" }, element("section", {}, element("h3", {}, "Roles"), this.roles),
        element("section", {}, element("h3", {}, "Configuration"), this.configuration)));
  }

  close() {
    this.panels.flat().forEach((panel) => panel.close());
  }

  recolour() {
    this.panels.flat().forEach((panel) => panel.recolour());
  }

  /** Reads the run. Returns true while the run is running. */
  async read() {
    this.told = await api.ofRun(this.run.key, "overview");
    this.tell();
    return this.told.state === "running";
  }

  draw(run, view) {
    this.run = run;
    for (const [file, names] of Object.entries(READ)) this.page.data.series(run, file, names);
    if (run.kind === "sft") for (const [, file, name] of LOSSES) this.page.data.series(run, file, [name]);
    for (const panel of this.panels.flat()) panel.draw([run], view, this.page.data);
    this.tell();
  }

  #column(file, name) {
    const [series] = this.page.data.series(this.run, file, []);
    return (series?.columns[name] ?? []).filter((each) => each !== null);
  }

  tell() {
    const told = this.told;
    if (!told) return;
    this.#tellProgress(told.done, told);
    fill(this.words[0], this.run.kind === "sft" ? this.#losses() : this.#learning(told));
    fill(this.words[1], this.#health(told));
    fill(this.words[2], this.#time(told));
    fill(this.roles, rolesOf(told));
    fill(this.configuration, Object.entries(told.configuration).flatMap(([key, given]) => [element("dt", {}, key), element("dd", {}, foreign(given ?? "none"))]));
  }

  #tellProgress(done, told) {
    const share = told.steps ? Math.min(1, done / told.steps) : null;
    this.progress.hidden = share === null;
    this.progress.firstChild.style.width = `${100 * (share ?? 0)}%`;
    this.progress.setAttribute("aria-valuenow", Math.round(100 * (share ?? 0)));
    fill(this.facts, [
      ["state", told.state],
      ["step", told.steps ? `${number(done)} of ${number(told.steps)}` : number(done)],
      ["elapsed", duration(told.elapsed_s)],
      told.left_s === null ? null : ["left, about", duration(told.left_s)],
      ["a step takes", duration(told.step_s)],
      told.tokens_per_s === null ? null : [told.state === "running" ? "sampled now" : "sampled", `${number(told.tokens_per_s)} tokens/s`],
    ].filter(Boolean).flatMap(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", { class: name === "state" ? `state ${text}` : null }, text))));
  }

  #learning(told) {
    return [...Object.entries(told.trends).map(changed), ...told.remarks.map((each) => element("p", { class: "advice" }, foreign(each)))];
  }

  /** The losses of a fine-tuning, at its first and at its newest step. */
  #losses() {
    return LOSSES.map(([title, file, name]) => [title, this.#column(file, name)]).filter(([, values]) => values.length).map(([title, values]) =>
      element("p", { class: "headline" }, `${title} `, element("b", {}, `${number(values[0])} \u2192 ${number(values.at(-1))}`)));
  }

  #health(told) {
    const sentences = [...told.warnings, ...told.problems];
    const [lags, entropy] = [this.#column("learner", "lag/max"), this.#column("learner", "entropy")];
    const shares = Object.entries(told.shares).map(([name, share]) => `${value(share, "share")} ${name}`);
    return [
      ...sentences.map((each) => element("p", { class: "warning" }, foreign(each))),
      sentences.length === 0 ? element("p", { class: "fine" }, "No warning.") : null,
      entropy.length ? element("p", {}, `Entropy ${number(entropy.at(-1))} nats a token.`) : null,
      shares.length ? element("p", {}, `Newest episodes: ${shares.join(", ")}.`) : null,
      lags.length ? element("p", {}, `Largest lag ${number(lags.at(-1))}`, told.max_lag === null ? "" : ` of ${told.max_lag} allowed`, ".") : null,
      told.dead_letters ? element("p", {}, element("a", { href: link({ tab: "episodes", view: "dead", run: this.run.key }) }, `${number(told.dead_letters)} dead letters`), ".") : null,
    ];
  }

  #time(told) {
    return [
      told.waits_text ? element("p", { class: "waits" }, foreign(told.waits_text)) : null,
      ...(told.advice ?? []).map((each) => element("p", { class: "advice" }, foreign(each))),
      told.waits_text || told.advice?.length ? null : element("p", { class: "fine" }, told.state === "running" ? "No role waits." : "No advice."),
    ];
  }
}

function figureLink(id) {
  return element("a", { href: link({ tab: "figures", show: id }), "aria-label": "Show this figure large" }, "\u2922");
}

/** "reward 0.91 → 1.41", in colour only if the values differ by more than their noise. */
function changed([name, { first, last, way }]) {
  const unit = name.endsWith("accuracy") ? "share" : "";
  return element("p", { class: "headline" }, `${name} `, element("b", { class: way }, `${value(first, unit)} \u2192 ${value(last, unit)}`));
}

function rolesOf(told) {
  const names = Object.keys(told.roles);
  if (names.length === 0) return element("p", { class: "fine" }, told.state === "running" ? "The roles were started by hand, so they are not listed." : "No role runs.");
  const row = (name) => {
    const { host, pid, restarts, fault } = told.roles[name];
    const doing = told.state !== "running" ? "ended" : fault ?? (pid ? `process ${pid}` : "not running");
    return element("tr", { class: told.state === "running" && (fault || !pid) ? "missing" : null }, element("th", { scope: "row" }, foreign(name)),
      element("td", {}, foreign(host)), element("td", {}, foreign(doing)), element("td", {}, restarts ? count(restarts, "restart") : "no restart"));
  };
  return element("table", {}, element("tbody", {}, names.map(row)));
}
