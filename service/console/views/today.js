// Today: the last 24 hours: recall, latency, failures, unknown ids.

import { html } from "../core/preact.js";
import { Empty } from "../core/ui.js";

export const title = "Today";
export const about = "the last 24 hours: recall, latency, failures, unknown ids";

export default function View({ model }) {
  return html`<${Empty}>This view of <bdi>${model.name}</bdi> is being built.</${Empty}>`;
}
