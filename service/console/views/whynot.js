// Why not: where an item fell out of the search.

import { html } from "../core/preact.js";
import { Empty } from "../core/ui.js";

export const title = "Why not";
export const about = "where an item fell out of the search";

export default function View({ model }) {
  return html`<${Empty}>This view of <bdi>${model.name}</bdi> is being built.</${Empty}>`;
}
