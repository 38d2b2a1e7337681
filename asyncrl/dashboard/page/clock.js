// What an x axis shows at a moment of a run: learner steps, time, trained samples or trained tokens.
//
// The roles write their rows at different times. The learner's rows give the progress of training at their times, and
// the axis is linear between two of these rows.

import { duration, number } from "./format.js";

const ROUND_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 432000, 864000, 8640000];
// Counts have no fractions.
const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat();

/** The axes by their names: the title, the format, and the distances of marks if these are not 1, 2 and 5. */
export const AXES = {
  step: { title: "learner step", format: number, steps: WHOLE },
  time: { title: "time since the start", format: duration, steps: ROUND_S },
  samples: { title: "trained trajectories", format: number, steps: WHOLE },
  tokens: { title: "trained tokens", format: number, steps: WHOLE },
};

/** The names of the learner's file that a clock needs. */
export const CLOCK = ["trajectories_trained", "tokens"];

export class Clock {
  /** `learner` is the series of learner.jsonl, and `start` the time of the run's first row of any role. */
  constructor(learner, start) {
    this.start = Number.isFinite(start) ? start : learner?.time[0] ?? 0;
    const { time = [], step = [], columns = {} } = learner ?? {};
    const tokens = columns.tokens ?? [];
    let seen = 0;
    const sums = step.map((each, index) => {
      // If rows are left out, each row that is read also counts for the rows left out before it.
      seen += (tokens[index] ?? 0) * (index ? each - step[index - 1] : each + 1);
      return seen;
    });
    this.marks = { time, step, samples: columns.trajectories_trained ?? [], tokens: sums };
  }

  /** The places of the rows of `series` on the axis. */
  places(axis, series) {
    const bySteps = series.file === "learner" || series.file === "evaluation";
    if (axis === "time") return series.time.map((time) => time - this.start);
    if (axis === "step" && bySteps) return series.step;
    return bySteps
      ? series.step.map((step) => between(this.marks.step, this.marks[axis], step))
      : series.time.map((time) => between(this.marks.time, this.marks[axis], time));
  }

  /** The time at a place of the axis. */
  timeAt(axis, place) {
    return axis === "time" ? place + this.start : between(this.marks[axis], this.marks.time, place);
  }

  /** The place of a learner step on the axis. */
  placeOf(axis, step) {
    if (axis === "step") return step;
    const place = between(this.marks.step, this.marks[axis], step);
    return axis === "time" && place !== null ? place - this.start : place;
  }

  /** The learner step at a place of the axis. */
  stepAt(axis, place) {
    return axis === "step" ? Math.round(place) : Math.round(between(this.marks.time, this.marks.step, this.timeAt(axis, place)));
  }
}

/** `values` at `place` among ascending `places`, in a straight line between neighbours, and level beyond the ends. */
export function between(places, values, place) {
  const last = Math.min(places.length, values.length) - 1;
  if (last < 0) return null;
  if (place <= places[0]) return values[0];
  if (place >= places[last]) return values[last];
  let low = 0;
  let high = last;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] <= place) low = middle;
    else high = middle;
  }
  const width = places[high] - places[low];
  return width > 0 ? values[low] + ((values[high] - values[low]) * (place - places[low])) / width : values[high];
}
