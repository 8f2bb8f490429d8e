// The parts that all views are made of. Texts become text nodes; what comes from data stands in <bdi>.

import { html, useEffect, useId, useRef, useState } from "./preact.js";
import { askKey } from "./api.js";

export { ItemBox } from "./combobox.js";

// A problem document, or a failure of this page, where it belongs. again: what to do on "Try again".
export function ProblemView({ problem, again }) {
  if (!problem) return null;
  const byKey = problem.wantsKey && (() => askKey(problem.role, problem).then((given) => given && again?.()));
  return html`<div class="problem" role="alert">
    <strong>${problem.title ?? "Something in this page failed"}${problem.status ? ` (${problem.status})` : ""}</strong>
    <p>${problem.detail ?? problem.message}</p>
    ${problem.errors?.length > 0 && html`<ul>
      ${problem.errors.map((wrong) => html`<li><code><bdi>${wrong.field}</bdi></code>${wrong.value === undefined ? " is missing" : html` is <code><bdi>${wrong.value}</bdi></code>`};
        expected ${wrong.expected}</li>`)}
    </ul>`}
    ${(again || byKey) && html`<div class="toolbar">
      ${byKey && html`<${Button} onClick=${byKey}>Enter a key</${Button}>`}
      ${again && html`<${Button} onClick=${again}>Try again</${Button}>`}
    </div>`}
  </div>`;
}

// kind: "" | "primary" | "danger" | "quiet"
export function Button({ kind = "", children, ...rest }) {
  return html`<button type="button" class=${`button ${kind}`} ...${rest}>${children}</button>`;
}

// Copies text() and says so.
export function CopyButton({ text, children, ...rest }) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    const timer = said && setTimeout(() => setSaid(""), 1500);
    return () => clearTimeout(timer);
  }, [said]);
  const copy = () => copied(text()).then((done) => setSaid(done ? "Copied" : "The browser did not allow it"));
  return html`<${Button} onClick=${copy} ...${rest}>${said || children}</${Button}><span class="unseen" role="status">${said}</span>`;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // plain HTTP from another machine has no clipboard
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// A range and a number that move one value. onInput(value) at every move.
export function Slider({ label, value, min, max, step = 1, onInput, hint }) {
  const id = useId();
  const take = (event) => {
    const next = Number(event.target.value);
    if (event.target.value !== "" && next >= min && next <= max) onInput(next);
  };
  return html`<div class="slider">
    <label for=${id}>${label}${hint && html` <span class="dim">${hint}</span>`}</label>
    <input class="number" type="number" aria-label=${`${label}, as a number`} min=${min} max=${max} step=${step} value=${value} onChange=${take} />
    <input id=${id} type="range" min=${min} max=${max} step=${step} value=${value} onInput=${take} />
  </div>`;
}

export function Toggle({ label, checked, onChange, hint, ...rest }) {
  return html`<label class="toggle"><input type="checkbox" checked=${checked} onChange=${(event) => onChange(event.target.checked)} ...${rest} />
    <span>${label}${hint && html` <span class="dim">${hint}</span>`}</span></label>`;
}

// options: [value, text] pairs, or values. onChange(value as a string).
export function Select({ label, value, options, onChange, hidden = false, ...rest }) {
  const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  return html`<label class="select"><span class=${hidden ? "unseen" : ""}>${label}</span>
    <select value=${value} onChange=${(event) => onChange(event.target.value)} ...${rest}>
      ${pairs.map(([name, text]) => html`<option value=${name} selected=${String(name) === String(value)}>${text}</option>`)}
    </select></label>`;
}

// columns: [{label, cell(row) -> node, numeric}]; rows: as many as the caller wants shown.
export function Table({ caption, columns, rows, rowKey, rowClass }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table>
    <caption class="unseen">${caption}</caption>
    <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.numeric ? "numeric" : ""}>${column.label}</th>`)}</tr></thead>
    <tbody>${rows.map((row, at) => html`<tr key=${rowKey ? rowKey(row) : at} class=${rowClass?.(row) ?? ""}>
      ${columns.map((column) => html`<td class=${column.numeric ? "numeric" : ""}>${column.cell(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

// Nothing to show, and what to do about it.
export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

// Something is under way. Takes its room at once and is seen after a moment, so that quick answers do not flicker.
export function Busy({ busy = true, children = "Loading…" }) {
  return html`<span class=${busy ? "busy" : "busy still"} role="status">${busy && children}</span>`;
}

// A share of 1 as a bar; the number beside it is the text.
export function Bar({ value, kind = "" }) {
  const bar = useRef(null);
  const width = `${Math.max(0, Math.min(1, value ?? 0)) * 100}%`;
  return html`<span class=${`bar ${kind}`} aria-hidden="true"><span ref=${bar} style=${{ width }}></span></span>`;
}

// kind: "" | "good" | "warn" | "bad" | "info"
export function Badge({ kind = "", children, ...rest }) {
  return html`<span class=${`badge ${kind}`} ...${rest}>${children}</span>`;
}
