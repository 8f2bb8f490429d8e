// A text field with completions (ARIA combobox with a list). Arrows choose, Enter takes, Escape closes.

import { html, useId, useRef, useState } from "./preact.js";
import { get } from "./api.js";
import { latest } from "./latest.js";
import { rememberTitles } from "./titles.js";

const WAIT_MS = 80;
const MOST = 12;

// complete(signal, text) -> promise of [{id, title}]; onChoose({id, title}); onText(text): a pasted list, true if it was taken.
function ComboBox({ label, hidden = false, placeholder, complete, onChoose, onText, keep = false, value = "", ...rest }) {
  const id = useId();
  const [text, setText] = useState(value);
  const [options, setOptions] = useState([]);
  const [at, setAt] = useState(0);
  const [open, setOpen] = useState(false);
  const [problem, setProblem] = useState(null);
  const current = useRef(null);
  current.current = complete;
  const search = useRef(null);
  search.current ??= latest((signal, typed) => current.current(signal, typed), WAIT_MS);
  const underway = useRef(null); // {entered: whether Enter was pressed meanwhile}
  const shown = open && options.length > 0;

  function type(typed) {
    const own = (underway.current = { entered: false });
    setText(typed);
    setOpen(true);
    setAt(0);
    setOptions(options.filter((option) => [option.id, option.title ?? ""].some((name) => name.toLowerCase().startsWith(typed.toLowerCase()))));
    search.current(typed).then(
      (found) => {
        if (own !== underway.current) return; // more was typed since
        const exact = Math.max(0, found.findIndex((option) => option.id === typed));
        underway.current = null;
        if (own.entered) return choose(found[exact] ?? { id: typed.trim(), title: null });
        setOptions(found.slice(0, MOST));
        setAt(exact);
        setProblem(null);
      },
      (error) => {
        if (own !== underway.current) return;
        underway.current = null;
        setOptions([]);
        setProblem(error.detail ?? error.message);
      },
    );
  }

  function choose(option) {
    search.current.cancel();
    underway.current = null;
    setText(keep ? option.id : "");
    setOptions([]);
    setOpen(false);
    onChoose(option);
  }

  function close() {
    search.current.cancel();
    underway.current = null;
    setOpen(false);
  }

  function press(event) {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!shown) type(text);
      else setAt((at + (event.key === "ArrowDown" ? 1 : options.length - 1)) % options.length);
    } else if (event.key === "Enter" && (shown || text.trim())) {
      event.preventDefault();
      if (underway.current) underway.current.entered = true; // what is listed is not yet what was typed
      else choose(shown ? options[at] : { id: text.trim(), title: null });
    } else if (event.key === "Escape" && open) {
      event.stopPropagation();
      close();
    }
  }

  function paste(event) {
    if (onText?.(event.clipboardData.getData("text"))) event.preventDefault();
  }

  return html`<div class="combobox">
    <label class=${hidden ? "unseen" : ""} for=${id}>${label}</label>
    <input id=${id} type="text" role="combobox" autocomplete="off" spellcheck=${false} aria-autocomplete="list" aria-expanded=${String(shown)}
      aria-controls=${`${id}-list`} aria-activedescendant=${shown ? `${id}-${at}` : undefined} placeholder=${placeholder} value=${text}
      onInput=${(event) => type(event.target.value)} onFocus=${() => text === "" && type("")} onKeyDown=${press} onBlur=${close} onPaste=${paste} ...${rest} />
    <ul id=${`${id}-list`} role="listbox" aria-label=${label} hidden=${!shown}>
      ${shown && options.map((option, place) => html`<li key=${option.id} id=${`${id}-${place}`} role="option" aria-selected=${String(place === at)}
        onMouseDown=${(event) => event.preventDefault()} onClick=${() => choose(option)} onMouseMove=${() => place !== at && setAt(place)}>
        <bdi class="mono">${option.id}</bdi>${option.title && html`<bdi class="dim">${option.title}</bdi>`}</li>`)}
    </ul>
    ${problem && open && html`<p class="hint bad" role="status">${problem}</p>`}
  </div>`;
}

// The combobox of a model's items.
export function ItemBox({ model, ...rest }) {
  const complete = async (signal, prefix) => {
    const { items } = await get(`models/${encodeURIComponent(model.name)}/items`, { prefix: prefix.slice(0, 200), limit: MOST }, signal);
    rememberTitles(model.name, items);
    return items;
  };
  return html`<${ComboBox} complete=${complete} ...${rest} />`;
}
