// Numbers for people: few digits, and short units.

const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** A number of any size in about five characters. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e\u2212");
  const [scale, prefix] = size >= 1e4 ? PREFIXES.find(([limit]) => size >= limit) : [1, ""];
  const scaled = value / scale;
  return `${Number(scaled.toPrecision(Math.abs(scaled) >= 100 ? 4 : 3))}${prefix}`.replace("-", "\u2212");
}

/** Seconds as "340 ms", "12 s", "4 min 10 s", "3 h 20 min" or "2 d 4 h". */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "\u2013";
  if (seconds < 0) return `\u2212${duration(-seconds)}`;
  if (seconds < 1) return seconds === 0 ? "0 s" : `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  for (const [limit, unit, part, small] of [[3600, 60, "min", "s"], [86400, 3600, "h", "min"]]) {
    if (seconds < limit) return joined(Math.floor(seconds / unit), part, Math.round((seconds % unit) / (unit / 60)), small);
  }
  return joined(Math.floor(seconds / 86400), "d", Math.round((seconds % 86400) / 3600), "h");
}

function joined(whole, unit, rest, small) {
  return rest ? `${whole} ${unit} ${rest} ${small}` : `${whole} ${unit}`;
}

/** A value in its unit: shares as percents, seconds and bytes in the size that fits. */
export function value(given, unit) {
  if (given === null || given === undefined || !Number.isFinite(given)) return "\u2013";
  if (unit === "share") return `${Number((100 * given).toPrecision(3))}%`;
  if (unit === "s") return duration(given);
  if (unit === "bytes") return `${number(given)}B`;
  if (unit === "GB") return `${number(given)} GB`;
  return number(given);
}
