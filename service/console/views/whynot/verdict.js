// What became of an item, in one sentence of plain English.

import { count, plural } from "../../core/format.js";

// Whether the search reached the item's leaf. height: the level of the leaves.
export function isScored(entry, height) {
  return ["returned", "below_m", "below_min_score"].includes(entry.outcome) || (entry.outcome === "pruned" && entry.level === height);
}

// Its place among all that was scored, as far as it is known.
export function placeOf(entry) {
  return entry.place ?? entry.path?.[entry.path.length - 1].place ?? null;
}

// entry: of explain.items; levels: of explain; m: how many came; height: the level of the leaves.
// {kind: "good" | "warn" | "bad", sentence}
export function verdict(entry, levels, { m, height }) {
  switch (entry.outcome) {
    case "returned":
      return { kind: "good", sentence: `It comes, at place ${count(entry.place)} of ${count(m)}${moved(entry)}.` };
    case "below_m":
      return { kind: "warn", sentence: `The search found it${moved(entry)}, but below the first ${count(m)}${entry.place ? `: it is ${ordinal(entry.place)}` : ""}. Ask for more results.` };
    case "below_min_score":
      return { kind: "warn", sentence: "The search found it, but its score is below the least score that was asked for." };
    case "not_searched":
      return { kind: "warn", sentence: "Its shard did not answer, so the search never looked at it. Ask again." };
    case "excluded":
      return { kind: "bad", sentence: "The query itself excludes it." };
    case "filtered":
      return { kind: "bad", sentence: "The filter forbids it: the search never looked at it." };
    case "removed":
      return { kind: "bad", sentence: "It is on the model's standing list of removed items: no answer may hold it." };
    case "deleted":
      return { kind: "bad", sentence: "It was deleted from the live catalogue." };
    case "unknown":
      return { kind: "bad", sentence: "The catalogue does not have it. Is the id right, and was it there when the model was trained?" };
    default:
      return { kind: "warn", sentence: pruned(entry, levels, height) };
  }
}

function pruned(entry, levels, height) {
  if (entry.trees) return `All ${count(entry.trees.length)} trees dropped it before they scored it.`;
  const at = (entry.path ?? []).find((ancestor) => ancestor.level === entry.level);
  const level = levels.find((one) => one.level === entry.level);
  const where = `level ${entry.level} of ${height}`;
  if (!at || at.place === null || !level) return `It fell out on ${where}.`;
  const rank = `${ordinal(at.place)} of ${count(level.candidates)}`;
  if (entry.level === height) return `The beam found it, but the scorer has it only ${rank}, and ${plural(level.kept, "item")} came back.`;
  return `It fell out on ${where}: its branch was ${rank}, and the beam keeps ${count(level.kept)}.`;
}

function moved(entry) {
  if (!entry.retrieved_place || entry.retrieved_place === entry.place) return "";
  return `, where the ranker moved it from place ${count(entry.retrieved_place)}`;
}

function ordinal(value) {
  const tens = value % 100;
  const suffix = tens > 10 && tens < 14 ? "th" : ({ 1: "st", 2: "nd", 3: "rd" }[value % 10] ?? "th");
  return `${count(value)}${suffix}`;
}
