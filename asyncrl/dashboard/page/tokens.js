// The tokens of one turn: coloured, each with its values, which show when the pointer or the keys reach it.

import { element } from "./dom.js";
import { nodesOf, number, readable } from "./text.js";

const NAMES = { logprob: "log-prob", proximal: "proximal log-prob", advantage: "advantage", weight: "importance weight", version: "version", mass: "grammar mass" };

// The tokens of a part that the server sent: {start, ids, pieces, special, sampled, logprob, ...}. Later ones are appended.
export class TokenBlock {
  // `scores` are the scored steps [{start, end, score}], `marks` the texts to show before a token, by its number;
  // `onpoint(values)` is called with the values of a token, or null.
  constructor(part, { scores, marks, onpoint }) {
    this.part = part;
    this.scores = scores;
    this.marks = marks;
    this.onpoint = onpoint;
    this.spans = [];
    this.current = -1;
    this.element = element("div", {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": `tokens of the ${part.role} turn; the arrow keys go from token to token`,
      onmouseover: (event) => this.#point(this.#place(event.target)),
      onmouseleave: () => this.onpoint(null),
      onclick: (event) => this.walkTo(this.#place(event.target)),
      onkeydown: (event) => this.#key(event),
      onblur: () => this.#leave(),
    });
    this.#append(part.tokens);
  }

  get end() {
    return this.part.tokens.start + this.part.tokens.ids.length;
  }

  // Add tokens that follow the last one.
  extend(tokens) {
    const all = this.part.tokens;
    const before = all.ids.length;
    for (const place of tokens.special) all.special.push(place + before);
    for (const [name, values] of Object.entries(tokens)) {
      if (name === "start" || name === "special") continue;
      // A part without a sampled token so far has no values.
      if (!all[name]) all[name] = new Array(before).fill(0);
      all[name].push(...values);
    }
    this.#append(tokens);
    if (this.coloured) this.colour(this.coloured);
  }

  colour(colouring) {
    this.coloured = colouring;
    this.spans.forEach((span, place) => {
      const value = this.#coloured(colouring.name, place);
      span.style.backgroundColor = value === undefined ? "" : colouring.colour(value);
    });
  }

  walkTo(place) {
    if (place < 0 || place >= this.spans.length) return;
    this.spans[this.current]?.classList.remove("current");
    this.current = place;
    this.spans[place].classList.add("current");
    this.spans[place].scrollIntoView({ block: "nearest" });
    this.#point(place);
  }

  #append(tokens) {
    const { ids, pieces } = tokens;
    const special = new Set(tokens.special);
    const shift = this.spans.length;
    const ends = new Map(this.scores.map((each) => [each.end, each]));
    const fragment = document.createDocumentFragment();
    ids.forEach((id, place) => {
      const at = tokens.start + place;
      if (this.marks.has(at)) fragment.append(element("span", { class: "parting" }, this.marks.get(at)));
      const span = document.createElement("span");
      span.className = special.has(place) ? "token special" : pieces[place] === "" ? "token inner" : "token";
      span.dataset.place = String(shift + place);
      span.append(...withLineEnds(pieces[place]));
      fragment.append(span);
      this.spans.push(span);
      const scored = ends.get(at + 1);
      if (scored) fragment.append(scoreMark(scored));
    });
    this.element.append(fragment);
  }

  #coloured(name, place) {
    const { tokens } = this.part;
    if (name === "sampled") return tokens.sampled?.[place] ?? 0;
    if (!tokens.sampled?.[place]) return undefined;
    if (name === "score") return this.#scoreAt(tokens.start + place)?.score;
    return tokens[name]?.[place];
  }

  #scoreAt(at) {
    return this.scores.find((each) => each.start <= at && at < each.end);
  }

  #place(target) {
    const span = target.closest?.(".token");
    return span && this.element.contains(span) ? Number(span.dataset.place) : -1;
  }

  #point(place) {
    if (place < 0) return;
    const { tokens } = this.part;
    const at = tokens.start + place;
    const sampled = Boolean(tokens.sampled?.[place]);
    const rows = [
      ["token", number(at)],
      ["id", String(tokens.ids[place])],
    ];
    if (sampled) {
      for (const [name, label] of Object.entries(NAMES)) if (tokens[name]) rows.push([label, number(tokens[name][place])]);
      if (typeof tokens.logprob[place] === "number") rows.splice(3, 0, ["probability", number(Math.exp(tokens.logprob[place]), 3)]);
      const scored = this.#scoreAt(at);
      if (scored) rows.push(["step score", number(scored.score)]);
    }
    const text = tokens.pieces[place];
    this.onpoint({
      text: text === "" ? "part of the character before" : readable(text).replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll(" ", "\u2423"),
      sampled,
      rows,
    });
  }

  #key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const last = this.spans.length - 1;
    if (event.key in steps) this.walkTo(Math.max(0, Math.min(last, this.current < 0 ? 0 : this.current + steps[event.key])));
    else if (event.key === "Home") this.walkTo(0);
    else if (event.key === "End") this.walkTo(last);
    else if (event.key === "Escape") this.#leave();
    else return;
    event.preventDefault();
  }

  #leave() {
    this.spans[this.current]?.classList.remove("current");
    this.current = -1;
    this.onpoint(null);
  }
}

// The score of a step, shown after its last token.
function scoreMark({ start, end, score }) {
  return element("span", { class: "score", title: `step score of tokens ${start} to ${end - 1}` }, number(score, 3));
}

// The text of a token, with a mark where a line ends.
function withLineEnds(text) {
  const lines = text.split("\n").map(nodesOf);
  return lines.flatMap((nodes, place) => (place ? [element("span", { class: "line-end", "aria-hidden": "true" }, "\u21b5"), "\n", ...nodes] : nodes));
}
