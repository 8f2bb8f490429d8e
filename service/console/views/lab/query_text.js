// Queries as people type and paste them, and back.

// The text of a query in its field.
export function asText(kind, query) {
  if (kind === "text") return query.text ?? "";
  if (kind === "vector") return (query.vector ?? []).join(", ");
  return (query.features?.indices ?? []).map((index, place) => `${index}:${query.features.values[place]}`).join(" ");
}

// {query: its members} of what was typed, or {wrong: why it cannot be read}.
export function parsed(kind, text, width) {
  if (kind === "text") return { query: { text } };
  return kind === "vector" ? parsedVector(text, width) : parsedFeatures(text, width);
}

// The ids of a pasted list: JSON, or separated by line ends, commas or tabs. null: it is no list.
export function asIds(text) {
  try {
    const list = JSON.parse(text);
    if (Array.isArray(list)) return list.filter((id) => typeof id === "string" || typeof id === "number").map(String);
  } catch {
    // not JSON
  }
  const ids = text.split(/[\n\r,\t]+/).map((id) => id.trim()).filter(Boolean);
  return ids.length > 1 ? ids : null;
}

function parsedVector(text, width) {
  const words = text.replace(/^\s*\[|\]\s*$/g, "").split(/[\s,]+/).filter(Boolean);
  const vector = words.map(Number);
  const wrong = words.find((_, place) => !Number.isFinite(vector[place]));
  if (wrong !== undefined) return { wrong: `“${wrong.slice(0, 40)}” is not a number.` };
  if (vector.length > 0 && vector.length !== width) return { wrong: `These are ${vector.length} numbers; the model takes ${width}.` };
  return { query: { vector } };
}

function parsedFeatures(text, width) {
  const read = { indices: [], values: [] };
  try {
    const { indices, values } = JSON.parse(text);
    Object.assign(read, { indices: indices.map(Number), values: values.map(Number) });
  } catch {
    for (const pair of text.split(/[\s,]+/).filter(Boolean)) {
      const [index, value = "1"] = pair.split(":");
      read.indices.push(index === "" ? NaN : Number(index));
      read.values.push(value === "" ? NaN : Number(value));
    }
  }
  if (read.indices.length !== read.values.length) return { wrong: "There must be as many values as feature numbers." };
  const wrong = read.indices.find((index) => !Number.isInteger(index) || index < 0 || index >= width);
  if (wrong !== undefined) return { wrong: `Expected feature numbers from 0 to ${width - 1}.` };
  if (read.values.some((value) => !Number.isFinite(value))) return { wrong: "A value is not a number." };
  if (new Set(read.indices).size < read.indices.length) return { wrong: "A feature number stands there twice." };
  return { query: { features: read } };
}
