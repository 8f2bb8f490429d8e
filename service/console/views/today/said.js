// The state of a model in a sentence, from the newest figures.

import { number, plural, share } from "../../core/format.js";

// {kind: "good" | "warn" | "bad", sentence}
export function said(health) {
  const firing = health.alerts.filter((alert) => alert.firing);
  const load = newest(health, "requests_per_s");
  const busy = load === null ? "" : load > 0 ? `, ${number(load, 2)} requests a second` : ", and nobody asks now";
  const shed = newest(health, "shed_per_s") ?? 0;
  const failed = newest(health, "errors_per_s") ?? 0;
  if (firing.length > 0) {
    const names = firing.slice(0, 3).map((alert) => alert.what.replace(/\.$/, "").toLowerCase()).join("; ");
    return { kind: "bad", sentence: `${plural(firing.length, "alert holds", "alerts hold")}: ${names}${firing.length > 3 ? "; and others" : ""}.` };
  }
  if (failed > 0) return { kind: "warn", sentence: `${number(failed, 2)} requests a second fail (5xx)${busy}.` };
  if (shed > 0) return { kind: "warn", sentence: `${number(shed, 2)} requests a second are refused (429)${busy}: the service is near its capacity.` };
  return { kind: "good", sentence: `All is well: ${recall(health)}${busy}.` };
}

function recall(health) {
  const now = newest(health, "recall");
  if (now === null) return "recall is not watched (ESPALIER_PROBE_PER_S=1 would replay a held-out query a second)";
  const expected = newest(health, "expected_recall");
  const away = expected === null ? null : now - expected;
  return `recall@${health.recall_m} ${share(now)}${away === null ? "" : Math.abs(away) < 0.0015 ? " as expected" : ` against ${share(expected)} expected`}`;
}

export function newest(health, name) {
  const values = health.series[name] ?? [];
  for (let place = values.length - 1; place >= 0; place--) if (values[place] !== null) return values[place];
  return null;
}
