// An item is put: its id, its fields, and the evidence of where it belongs.

import { html, useState } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { put } from "../../core/api.js";
import { count } from "../../core/format.js";
import { useAction } from "../../core/running.js";
import { Busy, Button, ItemBox, ProblemView } from "../../core/ui.js";

const MOST_EVENTS = 64; // of an item; the service says so too

export function PutForm({ model, onDone }) {
  const [id, setId] = useState("");
  const [fields, setFields] = useState({});
  const [events, setEvents] = useState("");
  const [like, setLike] = useState([]);
  const [text, setText] = useState("");
  const { busy, done: outcome, problem, run } = useAction();
  const kind = model.query.kind;
  const columns = (model.fields ?? []).filter((name) => name !== "id");

  const write = async () => {
    const body = bodyOf(kind, { fields, events, like, text });
    const done = await put(`models/${encodeURIComponent(model.name)}/items/${encodeURIComponent(id)}`, body, undefined, { key: "write" });
    onDone();
    return { ...done, id, query: body.events ? { [kind]: body.events[0] } : null };
  };
  const submit = (event) => {
    event.preventDefault();
    run("Placing, writing…", write);
  };
  return html`<section class="panel"><h2>Put an item in, or change one</h2>
    <form class="live-form" onSubmit=${submit}>
      <label class="field"><span>Id</span><input type="text" required value=${id} autocomplete="off" spellcheck=${false} onInput=${(event) => setId(event.target.value)} /></label>
      ${columns.map((name) => html`<label class="field" key=${name}><span><bdi>${name}</bdi></span><input type="text" value=${fields[name] ?? ""}
        onInput=${(event) => setFields({ ...fields, [name]: event.target.value })} /></label>`)}
      ${columns.length > 0 && html`<p class="hint">Numbers, true, false and lists as JSON: <code>["a", "b"]</code>. An empty field is left out.</p>`}
      <label class="field"><span>Events: ${EVENTS[kind].what}</span><textarea rows="4" spellcheck=${false} placeholder=${EVENTS[kind].example} value=${events} onInput=${(event) => setEvents(event.target.value)}></textarea></label>
      ${kind === "text" && html`<label class="field"><span>Text: what the item is about</span><textarea rows="2" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>`}
      <${ItemBox} model=${model} label="Like: items that it resembles" onChoose=${(option) => setLike([...like.filter((one) => one !== option.id), option.id])} />
      ${like.length > 0 && html`<ul class="toolbar">${like.map((one) => html`<li key=${one}><${Button} aria-label=${`No longer like ${one}`} onClick=${() => setLike(like.filter((other) => other !== one))}><bdi class="mono">${one}</bdi> ×</${Button}></li>`)}</ul>`}
      <div class="toolbar"><button type="submit" class="button primary" disabled=${busy !== null}>Put</button><${Busy} busy=${busy !== null}>${busy}</${Busy}></div>
    </form>
    <${ProblemView} problem=${problem} />
    ${outcome && html`<${Outcome} model=${model} outcome=${outcome} />`}
  </section>`;
}

function Outcome({ model, outcome }) {
  const { id, sequence, placed, unknown, visible, query } = outcome;
  return html`<div role="status" class="live-outcome"><p><strong class="good">${outcome.outcome}</strong>, operation ${count(sequence)}${visible ? ": the next request sees it." : "; a worker is still behind."}
      ${placed && html` Placed by ${placed.by} under <a href=${href("tree", { model: model.name, version: placed.version, node: placed.parent })}>node ${placed.parent}</a>.`}</p>
    ${unknown.length > 0 && html`<p class="warn">Unknown, and skipped: <bdi>${unknown.join(", ")}</bdi></p>`}
    <div class="toolbar">${query && html`<a href=${href("lab", { model: model.name, q: JSON.stringify(query) })}>See it in the Lab, by its first event</a>`}
      ${query && html`<a href=${href("whynot", { model: model.name, q: JSON.stringify(query), item: id })}>Is it found?</a>`}</div></div>`;
}

const EVENTS = {
  history: { what: "what people had before they came to it, a history a line, oldest first", example: "libsdl2-2.0-0, libgl1" },
  text: { what: "searches that led to it, one a line", example: "a search" },
  vector: { what: "vectors that led to it, one a line, as JSON", example: "[0.1, 0.2]" },
  features: { what: "queries that led to it, one a line, as JSON", example: '{"indices": [1], "values": [0.5]}' },
};

// The body of the PUT. Throws a problem that names the line that cannot be read.
function bodyOf(kind, { fields, events, like, text }) {
  const lines = events.split("\n").map((line) => line.trim()).filter(Boolean);
  if (lines.length > MOST_EVENTS) throw { title: "Too many events", detail: `${lines.length} lines; an item takes ${MOST_EVENTS}.` };
  const given = Object.entries(fields).filter(([, value]) => value.trim() !== "").map(([name, value]) => [name, valueOf(value)]);
  return {
    ...(given.length && { fields: Object.fromEntries(given) }),
    ...(lines.length && { events: lines.map((line, place) => eventOf(kind, line, place)) }),
    ...(like.length && { like }),
    ...(text.trim() && { text }),
  };
}

function eventOf(kind, line, place) {
  if (kind === "text") return line;
  if (kind === "history" && !line.startsWith("[")) return line.split(/[\s,]+/).filter(Boolean);
  try {
    return JSON.parse(line);
  } catch (error) {
    throw { title: "An event cannot be read", detail: `Line ${place + 1}: ${error.message}` };
  }
}

// A list, number or boolean where it is one as JSON, else the text itself.
function valueOf(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && (typeof value !== "object" || Array.isArray(value)) ? value : text;
  } catch {
    return text;
  }
}
