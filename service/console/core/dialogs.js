// Questions to the user: for an API key, and before something that is felt by others. The keyboard and the browser's Back can leave them.

import { html, useId, useLayoutEffect, useRef, useState } from "./preact.js";
import { setAsker, setKey } from "./api.js";
import { Button } from "./ui.js";

const KINDS = { retrieve: "a retrieval key", write: "a write key", admin: "an admin key" };

// While a question is asked, Back leaves it.
function useBack(question, leave) {
  useLayoutEffect(() => {
    if (!question) return;
    addEventListener("popstate", leave);
    return () => removeEventListener("popstate", leave);
  }, [question]);
}

// Asked when the service refuses a request. A key stays in this page's memory and is gone with it.
export function KeyDialog() {
  const dialog = useRef(null);
  const input = useRef(null);
  const id = useId();
  const [question, setQuestion] = useState(null);

  useLayoutEffect(() => { // before anything can be answered
    setAsker((role, problem) => new Promise((resolve) => setQuestion({ role, problem, resolve })));
  }, []);
  useLayoutEffect(() => {
    if (!question) return;
    dialog.current.showModal();
    input.current.value = "";
    input.current.focus();
  }, [question]);

  const answer = (event) => {
    event.preventDefault();
    const key = input.current.value.trim();
    if (key) setKey(question.role, key);
    end(Boolean(key));
  };
  const end = (given) => {
    dialog.current.close();
    input.current.value = "";
    question?.resolve(given);
    setQuestion(null);
  };
  useBack(question, () => end(false));

  return html`<dialog ref=${dialog} aria-labelledby=${`${id}-title`} onCancel=${(event) => (event.preventDefault(), end(false))}>
    ${question && html`<form onSubmit=${answer}>
      <h2 id=${`${id}-title`}>The service asks for ${KINDS[question.role]}</h2>
      <p class="dim">${question.problem.detail}</p>
      <label for=${id}>API key</label>
      <input id=${id} ref=${input} type="password" autocomplete="off" />
      <p class="hint">It is kept in this page's memory alone, until the page is closed or reloaded.</p>
      <div class="toolbar"><button type="submit" class="button primary">Use the key</button><${Button} onClick=${() => end(false)}>Without a key</${Button}></div>
    </form>`}
  </dialog>`;
}

// question: {title, detail, action, danger} or null; onAnswer(true | false)
export function Confirm({ question, onAnswer }) {
  const dialog = useRef(null);
  const id = useId();
  useLayoutEffect(() => {
    if (question) dialog.current.showModal();
    else dialog.current.close();
  }, [question]);
  useBack(question, () => onAnswer(false));
  return html`<dialog ref=${dialog} aria-labelledby=${`${id}-title`} onCancel=${(event) => (event.preventDefault(), onAnswer(false))}>
    ${question && html`<form onSubmit=${(event) => (event.preventDefault(), onAnswer(true))}>
      <h2 id=${`${id}-title`}>${question.title}</h2>
      <p class="dim">${question.detail}</p>
      <div class="toolbar"><button type="submit" class=${`button ${question.danger ? "danger" : "primary"}`}>${question.action}</button>
        <${Button} onClick=${() => onAnswer(false)}>Leave it</${Button}></div>
    </form>`}
  </dialog>`;
}
