// Frontier: recall over beams and milliseconds.

import { html } from "../core/preact.js";
import { Empty } from "../core/ui.js";

export const title = "Frontier";
export const about = "recall over beams and milliseconds";

export default function View({ model }) {
  return html`<${Empty}>This view of <bdi>${model.name}</bdi> is being built.</${Empty}>`;
}
