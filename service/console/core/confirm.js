// A question before something that is felt by others: a dialog that the keyboard can leave.

import { html, useId, useLayoutEffect, useRef } from "./preact.js";
import { Button } from "./ui.js";

// question: {title, detail, action, danger} or null; onAnswer(true | false)
export function Confirm({ question, onAnswer }) {
  const dialog = useRef(null);
  const id = useId();
  useLayoutEffect(() => {
    if (question) dialog.current.showModal();
    else dialog.current.close();
  }, [question]);
  return html`<dialog ref=${dialog} aria-labelledby=${`${id}-title`} onCancel=${(event) => (event.preventDefault(), onAnswer(false))}>
    ${question && html`<form onSubmit=${(event) => (event.preventDefault(), onAnswer(true))}>
      <h2 id=${`${id}-title`}>${question.title}</h2>
      <p class="dim">${question.detail}</p>
      <div class="toolbar"><button type="submit" class=${`button ${question.danger ? "danger" : "primary"}`}>${question.action}</button>
        <${Button} onClick=${() => onAnswer(false)}>Leave it</${Button}></div>
    </form>`}
  </dialog>`;
}
