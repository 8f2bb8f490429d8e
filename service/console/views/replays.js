// Replays: many queries over two sides.

import { html } from "../core/preact.js";
import { Empty } from "../core/ui.js";

export const title = "Replays";
export const about = "many queries over two sides";

export default function View({ model }) {
  return html`<${Empty}>This view of <bdi>${model.name}</bdi> is being built.</${Empty}>`;
}
