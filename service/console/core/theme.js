// Light, dark, or as the system has it: an attribute of the page, and a choice that this browser remembers.

import { html, useState } from "./preact.js";

const CHOICES = ["auto", "light", "dark"];

function stored() {
  try {
    const choice = localStorage.getItem("espalier-theme");
    return CHOICES.includes(choice) ? choice : "auto";
  } catch {
    return "auto"; // storage is switched off
  }
}

export function applyTheme(choice = stored()) {
  document.documentElement.dataset.theme = choice;
}

export function ThemeButton() {
  const [choice, setChoice] = useState(stored);
  const next = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
  const change = () => {
    setChoice(next);
    applyTheme(next);
    try {
      localStorage.setItem("espalier-theme", next);
    } catch {
      // it holds until the page is closed
    }
  };
  return html`<button type="button" class="button quiet" onClick=${change}>Theme: ${choice}</button>`;
}
