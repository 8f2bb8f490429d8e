// Tree: a node, its children and its items.

import { html } from "../core/preact.js";
import { Empty } from "../core/ui.js";

export const title = "Tree";
export const about = "a node, its children and its items";

export default function View({ model }) {
  return html`<${Empty}>This view of <bdi>${model.name}</bdi> is being built.</${Empty}>`;
}
