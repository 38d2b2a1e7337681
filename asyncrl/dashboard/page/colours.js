// The choices of colouring the tokens of an episode: for each choice the colour of a value, and its legend.
//
// The colours are blue and orange, since most people who confuse colours tell these two apart. A colour is
// the background of a token, and lets the text stay readable on light and on dark pages.

import { number } from "./text.js";

const BLUE = "47 111 237";
const ORANGE = "232 119 16";
const GREY = "128 128 128";
const VERSIONS = ["47 111 237", "232 119 16", "20 150 110", "190 60 150", "150 120 20", "90 90 200", "0 150 180"];
const STRONGEST = 0.62;

function shade(colour, strength) {
  return `rgb(${colour} / ${(Math.max(0, Math.min(1, strength)) * STRONGEST).toFixed(3)})`;
}

// Colours values on both sides of a middle: blue above, orange below.
function twoSided(middle, reach, distance = (value) => value - middle) {
  return (value) => {
    const from = distance(value) / (reach || 1);
    return shade(from < 0 ? ORANGE : BLUE, Math.abs(from));
  };
}

function ramp(colourOf, values, format = (value) => number(value, 2)) {
  return values.map((value) => ({ colour: colourOf(value), text: format(value) }));
}

function none(reason) {
  return { colour: () => "", legend: [], note: reason };
}

const KINDS = {
  sampled: {
    label: "mask",
    meaning: "Blue: the policy sampled the token. All other tokens were given: the prompt, tool results, the template.",
    of: () => ({
      colour: (sampled) => (sampled ? shade(BLUE, 0.45) : ""),
      legend: [
        { colour: shade(BLUE, 0.45), text: "sampled" },
        { colour: "", text: "given" },
      ],
    }),
  },
  logprob: {
    label: "log-prob",
    meaning: "The log-prob under the policy that sampled the token. Orange: the token was unlikely.",
    of: ({ logprob }) => {
      if (!logprob) return none("no token was sampled");
      const low = Math.min(logprob.low, -0.1);
      const colour = (value) => shade(ORANGE, value / low);
      return { colour, legend: ramp(colour, [0, low / 4, low / 2, low]) };
    },
  },
  advantage: {
    label: "advantage",
    meaning: "The advantage of the token. Blue: training makes it more likely; orange: less likely.",
    of: ({ advantage }) => {
      if (!advantage) return none("no token was sampled");
      const reach = Math.max(Math.abs(advantage.low), Math.abs(advantage.high), Math.abs(advantage.mean));
      if (!reach) return none("every advantage is 0: this episode taught nothing");
      const colour = twoSided(0, reach);
      return { colour, legend: ramp(colour, [-reach, -reach / 2, 0, reach / 2, reach]) };
    },
  },
  weight: {
    label: "importance weight",
    meaning: "The weight of the token in the loss, since an older policy may have sampled it. Blue: above 1; orange: below 1; 0: dropped.",
    of: ({ weight }) => {
      if (!weight) return none("no token was sampled");
      const distance = (value) => Math.log2(Math.max(value, 2 ** -6));
      const reach = Math.max(Math.abs(distance(weight.low)), Math.abs(distance(weight.high)), 0.05);
      const colour = twoSided(1, reach, distance);
      return { colour, legend: ramp(colour, [2 ** -reach, 2 ** (-reach / 2), 1, 2 ** (reach / 2), 2 ** reach]) };
    },
  },
  version: {
    label: "version",
    meaning: "The policy version that sampled the token: a colour for each.",
    of: ({ version }) => {
      if (!version) return none("no token was sampled");
      if (version.max < 0) return none("a demonstration: no policy sampled it");
      const colour = (value) => (value < 0 ? "" : shade(VERSIONS[value % VERSIONS.length], 0.6));
      const all = [];
      for (let each = version.min; each <= version.max && all.length < 12; each += 1) all.push(each);
      return { colour, legend: ramp(colour, all, String) };
    },
  },
  score: {
    label: "step score",
    meaning: "The process reward model's score of the token's step. Orange: low; blue: high.",
    of: (scales, scores) => {
      if (!scores.length) return none("no process reward model scored the steps of this episode");
      const values = scores.map((each) => each.score).filter((each) => typeof each === "number");
      const low = Math.min(0, ...values);
      const high = Math.max(1, ...values);
      const colour = twoSided((low + high) / 2, (high - low) / 2);
      return { colour, legend: ramp(colour, [low, low + (high - low) / 4, (low + high) / 2, high - (high - low) / 4, high]) };
    },
  },
  mass: {
    label: "grammar mass",
    meaning: "The policy's probability of all tokens that the grammar allows, together. Orange: the policy preferred other tokens.",
    of: ({ mass }) => {
      if (!mass) return none("no turn of this episode has a grammar");
      const colour = (value) => shade(ORANGE, 1 - value);
      return { colour, legend: ramp(colour, [1, 0.75, 0.5, 0.25, 0]) };
    },
  },
  none: { label: "nothing", meaning: "Plain text.", of: () => none("") },
};

// The names of all choices with their labels.
export function choices(scales) {
  return Object.entries(KINDS)
    .filter(([name]) => name !== "mass" || scales.mass)
    .map(([name, { label }]) => ({ name, label }));
}

// The colouring of an episode by a choice: {name, label, meaning, colour(value) -> CSS, legend, note}.
export function colouring(name, scales, scores) {
  const kind = KINDS[name] ? name : "sampled";
  const { label, meaning, of } = KINDS[kind];
  const found = of(scales, scores);
  return { name: kind, label, meaning, note: "", ...found, colour: (value) => (typeof value === "number" ? found.colour(value) : shade(GREY, 1)) };
}
