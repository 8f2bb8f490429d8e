// The query: a history, a text, features or a vector, as the model takes it, and what must not come back. A history is moved and removed by
// pointer or keyboard; what is typed or pasted is read as it stands in /retrieve, or as people write it.

import { html, useEffect, useRef, useState } from "../../core/preact.js";
import { titleOf, useTitles } from "../../core/titles.js";
import { Button, ItemBox, Toggle } from "../../core/ui.js";

const MOST_SHOWN = 100;

export function QueryPanel({ model, query, question, unknown, set }) {
  const kind = model.query.kind;
  const change = (changes, quiet = false) => {
    const next = { ...query, ...changes };
    for (const [name, value] of Object.entries(next)) if (value === undefined || value === false || value?.length === 0) delete next[name];
    set({ q: JSON.stringify(next) }, quiet);
  };
  const history = query.history ?? [];
  const exclude = query.exclude ?? [];
  const add = (ids) => change({ history: history.concat(ids.filter((id) => !history.includes(id))) });

  return html`<section class="panel query" aria-labelledby="query-title">
    <div class="toolbar"><h2 id="query-title">Query</h2>
      ${question.at && html`<span class="dim">held-out ${question.at[0]} of ${question.at[1]}</span>`}
      ${question.next && html`<${Button} kind="quiet end" onClick=${question.next}>Another one</${Button}>`}
    </div>
    ${kind === "history" && html`
      <${History} model=${model} ids=${history} unknown=${unknown} onChange=${(ids) => change({ history: ids })} />
      <${ItemBox} model=${model} label="Add an item to the history" placeholder="id or title, or paste a list   ( / )" onChoose=${(item) => add([item.id])}
        onText=${(text) => asIds(text) && (add(asIds(text)), true)} />
      <${Toggle} label="Leave out what is in the history" checked=${query.exclude_seen ?? false} onChange=${(checked) => change({ exclude_seen: checked })} />`}
    ${kind !== "history" && html`<${Typed} model=${model} query=${query} onChange=${(changes) => change(changes, true)} />`}
    ${exclude.length > 0 && html`<div class="field"><span>Not these</span><ul class="chips">
      ${exclude.map((id) => html`<li key=${id}><bdi class="mono">${id}</bdi><button type="button" class="cross" aria-label=${`Let ${id} come back`}
        onClick=${() => change({ exclude: exclude.filter((one) => one !== id) })}>×</button></li>`)}</ul></div>`}
  </section>`;
}

const LABELS = { text: "Text", features: "Features", vector: "Vector" };
const HINTS = {
  text: () => "Words that the model does not know are skipped.",
  features: (width) => `NUMBER:VALUE, separated by spaces; numbers below ${width.toLocaleString("en")}. Or JSON as in /retrieve.`,
  vector: (width) => `${width.toLocaleString("en")} numbers, separated by commas or spaces.`,
};

// A text, features or a vector in a field: what can be read becomes the query, what cannot says why.
function Typed({ model, query, onChange }) {
  const { kind, width } = model.query;
  const own = asText(kind, query);
  const [draft, setDraft] = useState(own);
  const [wrong, setWrong] = useState(null);
  useEffect(() => {
    const read = parsed(kind, draft, width);
    if (read.wrong || asText(kind, read.query) !== own) setDraft(own); // another query came from elsewhere
    setWrong(null);
  }, [own]);

  const type = (event) => {
    const text = event.target.value;
    setDraft(text);
    const read = parsed(kind, text, width);
    setWrong(read.wrong ?? null);
    if (read.query) onChange(read.query);
  };

  return html`<div class="field"><label for="typed">${LABELS[kind]}</label>
    <textarea id="typed" rows=${kind === "text" ? 2 : 5} spellcheck=${false} value=${draft} aria-invalid=${String(Boolean(wrong))} aria-describedby="typed-hint" onInput=${type}></textarea>
    <p id="typed-hint" class=${wrong ? "hint bad" : "hint"} role="status">${wrong ?? HINTS[kind](width)}</p></div>`;
}

// The items of a history, oldest first: dragged, moved and removed.
function History({ model, ids, unknown, onChange }) {
  const list = useRef(null);
  const [dragged, setDragged] = useState(null); // {from, to}
  const [said, setSaid] = useState("");
  const order = dragged ? moved(ids, dragged.from, dragged.to) : ids;
  const length = model.query.length;
  useTitles(model, ids.slice(0, MOST_SHOWN));

  const focus = (place) => requestAnimationFrame(() => list.current?.querySelectorAll(".grip")[place]?.focus());

  const remove = (place) => {
    setSaid(`${ids[place]} removed`);
    onChange(ids.filter((_, other) => other !== place));
    focus(Math.min(place, ids.length - 2));
  };

  const press = (event, place) => {
    const step = event.key === "ArrowUp" ? -1 : event.key === "ArrowDown" ? 1 : 0;
    if (event.key === "Delete" || event.key === "Backspace") {
      event.preventDefault();
      remove(place);
    } else if (step && ids[place + step] !== undefined) {
      event.preventDefault();
      if (event.altKey) {
        onChange(moved(ids, place, place + step));
        setSaid(`${ids[place]} is now ${place + step + 1} of ${ids.length}`);
      }
      focus(place + step);
    }
  };

  const grab = (event, place) => {
    event.currentTarget.setPointerCapture(event.pointerId);
    setDragged({ from: place, to: place });
  };
  const drag = (event) => {
    if (!dragged) return;
    const rows = [...list.current.children].map((row) => row.getBoundingClientRect());
    const over = rows.findIndex((row) => event.clientY < row.bottom);
    setDragged({ from: dragged.from, to: over < 0 ? rows.length - 1 : over });
  };
  const drop = () => {
    if (dragged && dragged.from !== dragged.to) onChange(order);
    setDragged(null);
  };

  if (ids.length === 0) return html`<p class="hint">The history is empty: what a new user would get.</p>`;
  return html`<div>
    <p class="hint" id="history-hint">Oldest first; the last ${length} known ones count. <span class="unseen">Alt with an arrow moves an item, Delete removes it.</span></p>
    <ol class="history" ref=${list} aria-label="History" aria-describedby="history-hint">
      ${order.slice(0, MOST_SHOWN).map((id, place) => html`<li key=${place} class=${dragged?.to === place ? "dragged" : ""}>
        <button type="button" class="grip" aria-label=${`${titleOf(model.name, id) ?? id}, ${place + 1} of ${ids.length}`} title="Drag to move; or Alt with an arrow. Delete removes."
          onKeyDown=${(event) => press(event, place)} onPointerDown=${(event) => grab(event, place)} onPointerMove=${drag} onPointerUp=${drop} onPointerCancel=${() => setDragged(null)}>
          <span aria-hidden="true">⠿</span></button>
        <span class="ellipsis"><bdi class="mono">${id}</bdi> <bdi class="dim">${titleOf(model.name, id)}</bdi></span>
        ${unknown.includes(id) && html`<span class="badge warn">not in the catalogue</span>`}
        <button type="button" class="cross" aria-label=${`Remove ${id}`} onClick=${() => remove(place)}>×</button>
      </li>`)}
    </ol>
    ${ids.length > MOST_SHOWN && html`<p class="hint">and ${ids.length - MOST_SHOWN} more</p>`}
    <span class="unseen" role="status">${said}</span>
  </div>`;
}

function moved(ids, from, to) {
  const others = ids.filter((_, place) => place !== from);
  return [...others.slice(0, to), ids[from], ...others.slice(to)];
}

// The text of a query in its field.
function asText(kind, query) {
  if (kind === "text") return query.text ?? "";
  if (kind === "vector") return (query.vector ?? []).join(", ");
  return (query.features?.indices ?? []).map((index, place) => `${index}:${query.features.values[place]}`).join(" ");
}

// {query: its members} of what was typed, or {wrong: why it cannot be read}.
function parsed(kind, text, width) {
  if (kind === "text") return { query: { text } };
  return kind === "vector" ? parsedVector(text, width) : parsedFeatures(text, width);
}

// The ids of a pasted list: JSON, or separated by line ends, commas or tabs. null: it is no list.
function asIds(text) {
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
