// Makes the lines of a figure from the rows of a run's files. A line is a column of one file, or its sum or mean over
// several files.

const FORGOTTEN_S = 30;
const FORGOTTEN_ROWS = 2;
const ENOUGH = 100;

/** The lines that a figure's `spec` draws of one run: each with `label`, `x` and `y`.
 *
 * `spec` has `file` ("learner", "actor-*"), `name` (a metric, or "lag/*" for all that begin so), and maybe `label` (for
 * several metrics the beginning of their labels, or a function of the rest of their names), `only` (a pattern of what
 * follows), `combine` ("each", or "sum" or "mean" over the files), `rate` (a counter's rise per second), `of` (the line is
 * the share of the counter `of` that the counter `name` has, together with the counters `and`), `order` (of names). */
export function linesOf(spec, clock, axis, all) {
  const found = all.flatMap((series) => namesLike(series, spec.name, spec.only).map((name) => ({ series, name })));
  const names = [...new Set(found.map((each) => each.name))].sort(spec.order ?? byNumber);
  return names.flatMap((name) => {
    const columns = found.filter((each) => each.name === name).map(({ series }) => ({
      file: series.file,
      time: series.time,
      x: clock.places(axis, series),
      y: valuesOf(spec, series, name, ENOUGH / all.length),
    }));
    const rest = spec.name.endsWith("*") ? name.slice(spec.name.length - 1) : null;
    const label = rest === null ? spec.label ?? name : typeof spec.label === "function" ? spec.label(rest) : `${spec.label ?? ""}${rest}`;
    if (columns.length === 1) return [{ label: label || columns[0].file, name, ...columns[0] }];
    if ((spec.combine ?? "each") === "each") {
      return columns.map((column) => ({ label: `${label} ${column.file}`.trim(), name, ...column }));
    }
    return [{ label, name, ...combined(columns, spec.combine) }];
  });
}

/** The metrics of a file that a spec needs. */
export function namesOf(spec) {
  return [spec.name, ...(spec.and ?? []), ...(spec.of ? [spec.of] : [])];
}

function valuesOf(spec, series, name, enough) {
  const values = series.columns[name];
  if (spec.rate) return rates(series.time, values);
  if (!spec.of) return values;
  const others = (spec.and ?? []).map((each) => series.columns[each] ?? []);
  return shares(values.map((value, row) => others.reduce((sum, each) => sum + (each[row] ?? 0), value ?? 0)), series.columns[spec.of] ?? [], enough);
}

/** The share that the counter `parts` has of the counter `wholes`, over the newest rise of `wholes` by `enough`. A counter
 * that falls was reset by a restart of its process. */
function shares(parts, wholes, enough) {
  let from = 0;
  return parts.map((part, row) => {
    const whole = wholes[row] ?? null;
    if (whole === null) return null;
    if (row > 0 && whole < (wholes[row - 1] ?? 0)) from = row;
    while (from + 1 < row && whole - wholes[from + 1] >= enough) from += 1;
    const rise = whole - (wholes[from] ?? 0);
    return rise > 0 ? (part - parts[from]) / rise : null;
  });
}

function namesLike(series, name, only = /^[^/]*$/) {
  if (!name.endsWith("*")) return series.columns[name]?.some((value) => value !== null) ? [name] : [];
  const begin = name.slice(0, -1);
  // A column without a value was requested by its name, for another figure.
  const fits = (each) => each.startsWith(begin) && only.test(each.slice(begin.length)) && series.columns[each].some((value) => value !== null);
  return Object.keys(series.columns).filter(fits);
}

function byNumber(one, two) {
  return one.localeCompare(two, "en", { numeric: true });
}

/** The rise per second since the row before. A counter that falls was reset by a restart of its process. */
function rates(time, values) {
  return values.map((value, index) => {
    const before = values[index - 1];
    const seconds = time[index] - time[index - 1];
    if (value === null || before === null || before === undefined || !(seconds > 0)) return null;
    return (value >= before ? value - before : value) / seconds;
  });
}

/** The sum or mean over files, whose rows are at different moments: each counts with its newest value. A file that has
 * ended is forgotten. */
function combined(columns, how) {
  const limits = columns.map((column) => column.time.map((_, row) => forgottenAfter(column.time, row)));
  const events = columns.flatMap((column, index) => column.time.map((time, row) => [time, index, row]));
  events.sort((one, two) => one[0] - two[0]);
  const newest = new Map();
  const made = { file: "", time: [], x: [], y: [] };
  for (const [time, index, row] of events) {
    newest.set(index, { until: time + limits[index][row], value: columns[index].y[row] });
    const values = [...newest.values()].filter((each) => each.value !== null && time < each.until);
    const sum = values.reduce((total, each) => total + each.value, 0);
    made.time.push(time);
    made.x.push(columns[index].x[row]);
    made.y.push(values.length === 0 ? null : how === "mean" ? sum / values.length : sum);
  }
  return made;
}

/** The seconds for which the value of a row counts. Of a long file, only some rows are read, which lie far apart. Next to a
 * pause of the run, only one neighbour of a row is far away. */
function forgottenAfter(time, row) {
  const distances = [time[row] - time[row - 1], time[row + 1] - time[row]].filter(Number.isFinite);
  return Math.max(FORGOTTEN_S, distances.length ? FORGOTTEN_ROWS * Math.min(...distances) : 0);
}

/** An exponential mean without a bias at its start; `weight` in [0, 1) is the weight of the past. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}
