// Numbers, times and shares as people read them. Always in English, with a point: an address that is sent to a colleague reads the same.

export const MISSING = "–";

// Made once: each costs as much as a thousand uses.
const whole = new Intl.NumberFormat("en");
const rounded = []; // by the number of digits
const hours = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

// 3 significant digits: 0.0123, 4.57, 12.3, 12,345.
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  const most = Math.min(21, Math.max(digits, Math.trunc(Math.abs(value)).toString().length));
  rounded[most] ??= new Intl.NumberFormat("en", { maximumSignificantDigits: most });
  return rounded[most].format(value);
}

export function count(value) {
  return value === null || value === undefined ? MISSING : whole.format(value);
}

// A score or a recall: .727.
export function share(value, digits = 3) {
  return value === null || value === undefined || Number.isNaN(value) ? MISSING : value.toFixed(digits).replace(/^(-?)0\./, "$1.");
}

export function percent(value, digits = 0) {
  return value === null || value === undefined || Number.isNaN(value) ? MISSING : `${(100 * value).toFixed(digits)} %`;
}

export function ms(value) {
  if (value === null || value === undefined) return MISSING;
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value < 10 ? value.toFixed(2) : value.toFixed(value < 100 ? 1 : 0)} ms`;
}

// How long ago, or how long: 5 s, 12 min, 3.5 h, 2 days.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${number(seconds / 3600, 2)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

// A moment, from seconds since 1970 or ISO 8601, in the reader's time zone: 2026-11-22 06:14.
export function moment(value) {
  const date = new Date(typeof value === "number" ? value * 1000 : value);
  if (Number.isNaN(date.getTime())) return MISSING;
  const local = new Date(date.getTime() - date.getTimezoneOffset() * 60000);
  return local.toISOString().slice(0, 16).replace("T", " ");
}

// The time of day, from seconds since 1970, in the reader's time zone: 06:14.
export function clock(seconds) {
  return hours.format(seconds * 1000);
}

// 1 item, 2 items.
export function plural(value, one, many = one + "s") {
  return `${count(value)} ${value === 1 ? one : many}`;
}
