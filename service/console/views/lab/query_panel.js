// The query: a history, a text, features or a vector, as the model takes it, and what must not come back.

import { html, useEffect, useState } from "../../core/preact.js";
import { Button, ItemBox, Toggle } from "../../core/ui.js";
import { History } from "./history.js";
import { asIds, asText, parsed } from "./query_text.js";

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
      ${question.at && html`<span class="dim">held-out query ${question.at[0]} of ${question.at[1]}</span>`}
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
