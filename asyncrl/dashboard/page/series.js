// The metrics of the runs as columns of numbers, read on request. Rows that were read are kept, and only newer rows are
// requested.

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

  /** Reads the new rows. Returns true if there were any. */
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

  /** Requests `names` from the files of `run` that fit `pattern`, from now on. Returns the series that are read so far. */
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

  /** Reads the new rows of all requested series of `runs`. Returns true if there were any. */
  async refresh(runs) {
    const reads = [...this.#series.values()].map((series) => {
      const stamp = runs.find((run) => run.key === series.run)?.files[series.file];
      return stamp === undefined ? false : series.refresh(stamp);
    });
    return (await Promise.all(reads)).some(Boolean);
  }

  /** True if a requested series of `runs` is not read yet. */
  isMissing(runs) {
    return [...this.#series.values()].some((series) => series.missing && runs.some((run) => run.key === series.run));
  }

  /** The time of the first row of a run that was read. */
  firstTime(run) {
    const times = [...this.#series.values()].filter((series) => series.run === run && series.time.length).map((series) => series.time[0]);
    return Math.min(...times);
  }

  /** The rows of a series in times [first, last], at a finer resolution than in the whole series. */
  async detail(series, first, last) {
    const query = { file: series.file, name: [...series.wanted], points: POINTS, from: first, to: last };
    const found = await api.ofRun(series.run, "series", query);
    const detail = new Series(series.run, series.file);
    detail.append(found);
    return detail;
  }
}

/** The names of a run's files that fit a pattern such as "learner" or "actor-*". */
export function filesLike(run, pattern) {
  const begin = pattern.endsWith("*") ? pattern.slice(0, -1) : null;
  return Object.keys(run.files).filter((file) => (begin === null ? file === pattern : file.startsWith(begin)));
}
