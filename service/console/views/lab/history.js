// The items of a history, oldest first: dragged, moved and removed by pointer or keyboard.

import { html, useRef, useState } from "../../core/preact.js";
import { titleOf, useTitles } from "../../core/titles.js";

const MOST_SHOWN = 100;

export function History({ model, ids, unknown, onChange }) {
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
      ${order.slice(0, MOST_SHOWN).map((id, place) => html`<li key=${id} class=${dragged?.to === place ? "dragged" : ""}>
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
