// Models: versions, shapes and figures.

import { html } from "../core/preact.js";
import { Empty } from "../core/ui.js";

export const title = "Models";
export const about = "versions, shapes and figures";

export default function View({ model }) {
  return html`<${Empty}>This view of <bdi>${model.name}</bdi> is being built.</${Empty}>`;
}
