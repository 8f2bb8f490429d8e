// Lab: ask, move the beam, compare.

import { html } from "../core/preact.js";
import { Empty } from "../core/ui.js";

export const title = "Lab";
export const about = "ask, move the beam, compare";

export default function View({ model }) {
  return html`<${Empty}>This view of <bdi>${model.name}</bdi> is being built.</${Empty}>`;
}
