// The metrics of the runs as columns of numbers, as far as somebody wants them. What was read is kept, and only what
// was written since is asked for.

import * as api from "./api.js";

const POINTS = 600;
const TOO_MANY = 4 * POINTS;

/** The wanted columns of one file of one run. `step`, `time` and each of `columns` have one value a row. */
class Series {
  constructor(run, file) {
    Object.assign(this, { run, file, step: [], time: [], columns: {}, rows: 0, all: true, cursor: "", stamp: "" });
    this.wanted = new Set();
    this.missing = false;
  }

  want(names) {
    for (const name of names) {
      if (this.wanted.has(name)) continue;
      this.wanted.add(name);
      this.missing = true;
    }
  }

  /** Reads what is new. Returns whether there was something. */
  async refresh(stamp) {
    if (stamp === this.stamp && !this.missing) return false;
    const whole = this.missing || this.time.length > TOO_MANY;
    this.missing = false;
    const query = { file: this.file, name: [...this.wanted], points: POINTS, after: whole ? "" : this.cursor };
    const found = await api.ofRun(this.run, "series", query);
    if (found.reset) this.clear();
    this.append(found);
    this.stamp = stamp;
    return true;
  }

  clear() {
    Object.assign(this, { step: [], time: [], columns: {}, rows: 0, all: true });
  }

  append(found) {
    const before = this.time.length;
    const names = new Set([...Object.keys(this.columns), ...Object.keys(found.columns)]);
    for (const name of names) {
      const old = this.columns[name] ?? new Array(before).fill(null);
      this.columns[name] = old.concat(found.columns[name] ?? new Array(found.time.length).fill(null));
    }
    this.step = this.step.concat(found.step);
    this.time = this.time.concat(found.time);
    this.rows += found.rows;
    this.all &&= found.all;
    this.cursor = found.cursor;
  }
}

/** All series of the page. */
export class Store {
  #series = new Map();

  /** Has the files of `run` that fit `pattern` read `names` from now on, and gives what is known of them. */
  want(run, pattern, names) {
    return filesLike(run, pattern).map((file) => {
      const series = this.#of(run.key, file);
      series.want(names);
      return series;
    });
  }

  #of(run, file) {
    const key = `${run}\n${file}`;
    if (!this.#series.has(key)) this.#series.set(key, new Series(run, file));
    return this.#series.get(key);
  }

  /** Reads what is new of all that is wanted of `runs`. Returns whether anything was. */
  async refresh(runs) {
    const reads = [...this.#series.values()].map((series) => {
      const stamp = runs.find((run) => run.key === series.run)?.files[series.file];
      return stamp === undefined ? false : series.refresh(stamp);
    });
    return (await Promise.all(reads)).some(Boolean);
  }

  /** Whether something of `runs` was wanted since, and is not read. */
  isMissing(runs) {
    return [...this.#series.values()].some((series) => series.missing && runs.some((run) => run.key === series.run));
  }

  /** The time of the first row of a run that was read. */
  firstTime(run) {
    const times = [...this.#series.values()].filter((series) => series.run === run && series.time.length).map((series) => series.time[0]);
    return Math.min(...times);
  }

  /** The rows of a series in times [first, last], more of them than the whole has there. */
  async detail(series, first, last) {
    const query = { file: series.file, name: [...series.wanted], points: POINTS, from: first, to: last };
    const found = await api.ofRun(series.run, "series", query);
    const detail = new Series(series.run, series.file);
    detail.append(found);
    return detail;
  }
}

/** The names of a run's files that fit "learner", or "actor-*" for all that begin so. */
export function filesLike(run, pattern) {
  const begin = pattern.endsWith("*") ? pattern.slice(0, -1) : null;
  return Object.keys(run.files).filter((file) => (begin === null ? file === pattern : file.startsWith(begin)));
}
