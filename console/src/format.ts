/** Texts for numbers, times and paths. Unknown values become a dash. */

export const UNKNOWN = "–";

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function known(value: number | null | undefined): value is number {
  return typeof value === "number" && Number.isFinite(value);
}

export function count(value: number | null | undefined): string {
  return known(value) ? plain.format(value) : UNKNOWN;
}

export function short(value: number | null | undefined): string {
  return known(value) ? compact.format(value) : UNKNOWN;
}

/** A measured value with four significant digits, in scientific notation if it is very small or large. */
export function measure(value: number | null | undefined): string {
  if (!known(value)) return UNKNOWN;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return plain.format(value);
  return value.toPrecision(4);
}

const UNITS = ["B", "kB", "MB", "GB", "TB"] as const;

export function bytes(value: number | null | undefined): string {
  if (!known(value)) return UNKNOWN;
  let rest = value;
  let unit = 0;
  while (rest >= 1000 && unit < UNITS.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  return `${unit === 0 || rest >= 100 ? Math.round(rest) : rest.toFixed(1)} ${UNITS[unit]}`;
}

export function duration(seconds: number | null | undefined): string {
  if (!known(seconds)) return UNKNOWN;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return minutes < 10 && whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function ago(time: string | null | undefined, now: number): string {
  if (!time) return UNKNOWN;
  const seconds = (now - Date.parse(time)) / 1000;
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export function until(time: string, now: number): string {
  const seconds = (Date.parse(time) - now) / 1000;
  return seconds <= 0 ? "now" : `in ${duration(seconds)}`;
}

const moments = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });

export function moment(time: string | null | undefined): string {
  return time ? moments.format(new Date(time)) : UNKNOWN;
}

const days = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const minutes = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const wholeSeconds = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** The label of a time on an axis whose marks are `apart` seconds from each other. Midnight has the name of its day. */
export function timeTick(seconds: number, apart: number): string {
  const at = new Date(seconds * 1000);
  if (apart >= 86_400 || (at.getHours() === 0 && at.getMinutes() === 0 && at.getSeconds() === 0))
    return days.format(at);
  return (apart < 60 ? wholeSeconds : minutes).format(at);
}

/** The last part of a model's name, which tells models of one owner apart. */
export function modelName(name: string): string {
  return name.slice(name.lastIndexOf("/") + 1);
}

/** A short name for a model: a path is long, and its first part says nothing to people. */
export function modelLabel(name: string): string {
  const found = /^tinker:\/\/([^/]+)\/[^/]+\/(.+)$/.exec(name);
  return found?.[1] && found[2] ? `${found[2]} of run ${runName(found[1])}` : name;
}

/** The beginning of the ID of a session or a run, with the number of a run. */
export function runName(id: string): string {
  const [session = id, , number] = id.split(":");
  const start = session.replace(/^(sess|rest)-/, "").slice(0, 8);
  return number === undefined ? start : `${start}:${number}`;
}
