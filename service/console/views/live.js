// Live: items that come and go while the service runs.

import { html } from "../core/preact.js";
import { Empty } from "../core/ui.js";

export const title = "Live";
export const about = "items that come and go while the service runs";

export default function View({ model }) {
  return html`<${Empty}>This view of <bdi>${model.name}</bdi> is being built.</${Empty}>`;
}
