// Charts as SVG in the colours of the page, and the same figures as a table for screen readers. Gaps stay gaps.

import { clock } from "./format.js";
import { html, useLayoutEffect, useRef, useState } from "./preact.js";

const MOST_TABLE_ROWS = 50;
const LEFT = 46;
const RIGHT = 10;
const TOP = 14;
const BOTTOM = 20;
const NAME_WIDTH = 52; // least room of a name on the x axis

// title        what is drawn
// x            ascending numbers; seconds since 1970 with time
// series       [{label, values (null: a gap), colour (1 to 5), dash, points, low, high}]; low and high are drawn as a band
// format       of a y value; xFormat, xLabel of x
// marks        [{x, label}]: vertical lines
// range        [low, high] of y; either may be null: by the data
// logarithmic  the x axis
export function Chart({ title, x, series, time = false, format = String, xFormat = String, xLabel, marks = [], range = [], height = 170, logarithmic = false }) {
  const place = useRef(null);
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState(null);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);

  const named = time ? clock : xFormat;
  const xScale = scale(x.length ? [x[0], x[x.length - 1]] : [0, 1], [LEFT, Math.max(LEFT + 1, width - RIGHT)], logarithmic);
  const [low, high, yTicks] = yRange(series, range);
  const yScale = scale([low, high], [height - BOTTOM, TOP]);
  const shown = at !== null && at < x.length ? at : null;
  const point = (event) => setAt(nearest(x.map(xScale), event.clientX - place.current.getBoundingClientRect().left));

  return html`<figure class="chart">
    <figcaption>${title}
      ${series.length > 1 && html`<span class="legend">${series.map((one, own) => html`<span><i class=${`swatch series-${one.colour ?? own + 1}`}></i>${one.label}</span>`)}</span>`}
      ${shown !== null && html`<span class="reading">${[named(x[shown]), ...series.map((one) => `${one.label} ${one.values[shown] === null ? "–" : format(one.values[shown])}`)].join(" · ")}</span>`}
    </figcaption>
    <div ref=${place} class="plot" aria-hidden="true" onPointerMove=${point} onPointerLeave=${() => setAt(null)}>
      ${width > 0 && html`<svg width=${width} height=${height}>
        ${yTicks.map((value) => html`<line class="grid" x1=${LEFT} x2=${width - RIGHT} y1=${yScale(value)} y2=${yScale(value)} />
          <text x=${LEFT - 6} y=${yScale(value) + 4} text-anchor="end">${format(value)}</text>`)}
        ${apart(xTicks(x, time, logarithmic, width), xScale).map((value) => html`<text x=${xScale(value)} y=${height - 5} text-anchor=${xScale(value) > width - 30 ? "end" : "middle"}>${named(value)}</text>`)}
        ${marks.filter((mark) => mark.x >= x[0] && mark.x <= x[x.length - 1]).map((mark) => html`<g class="event"><title>${mark.label}</title>
          <line x1=${xScale(mark.x)} x2=${xScale(mark.x)} y1=${TOP} y2=${height - BOTTOM} /><text x=${xScale(mark.x) + 3} y=${TOP - 3}>${mark.label}</text></g>`)}
        ${series.map((one, own) => html`<g class=${`series-${one.colour ?? own + 1}`}>
          ${one.low && html`<path class="band" d=${band(x, one, xScale, yScale)} />`}
          <path class=${one.dash ? "line dash" : "line"} d=${path(x, one.values, xScale, yScale)} />
          ${one.points && x.map((value, place) => one.values[place] !== null && html`<circle cx=${xScale(value)} cy=${yScale(one.values[place])} r="3" />`)}
          ${shown !== null && one.values[shown] !== null && html`<circle cx=${xScale(x[shown])} cy=${yScale(one.values[shown])} r="3.5" />`}
        </g>`)}
        ${shown !== null && html`<line class="cursor" x1=${xScale(x[shown])} x2=${xScale(x[shown])} y1=${TOP} y2=${height - BOTTOM} />`}
      </svg>`}
    </div>
    <div class="unseen"><table><caption>${title}</caption>
      <thead><tr><th scope="col">${xLabel ?? (time ? "Time" : "x")}</th>${series.map((one) => html`<th scope="col">${one.label}</th>`)}</tr></thead>
      <tbody>${thinned(x.length).map((row) => html`<tr><th scope="row">${named(x[row])}</th>
        ${series.map((one) => html`<td>${one.values[row] === null ? "unknown" : format(one.values[row])}</td>`)}</tr>`)}</tbody>
    </table></div>
  </figure>`;
}

// A function from values of a domain to pixels.
function scale([low, high], [from, to], logarithmic = false) {
  const bend = logarithmic ? Math.log : Number;
  const span = bend(high) - bend(low);
  return (value) => Math.round(10 * (span > 0 ? from + ((bend(value) - bend(low)) / span) * (to - from) : (from + to) / 2)) / 10;
}

// [low, high, ticks] of the y axis: about four round steps around all that is drawn.
function yRange(series, [least = null, most = null]) {
  let [low, high] = [Infinity, -Infinity];
  for (const one of series) {
    for (const values of [one.values, one.low ?? [], one.high ?? []]) {
      for (const value of values) {
        if (value === null || !Number.isFinite(value)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
  }
  if (low > high) [low, high] = [0, 1];
  low = least ?? low;
  high = Math.max(most ?? high, low);
  if (low === high) high = low + (Math.abs(low) || 1) / 2;
  const step = roundStep((high - low) / 4);
  low = least ?? Math.floor(low / step) * step;
  high = most ?? Math.ceil(high / step - 1e-9) * step;
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-6; tick++) ticks.push(Number((tick * step).toPrecision(10)));
  return [low, high, ticks];
}

function roundStep(size) {
  const power = 10 ** Math.floor(Math.log10(size));
  return [1, 2, 5, 10].find((digit) => digit * power >= size * 0.999) * power;
}

function xTicks(x, time, logarithmic, width) {
  if (x.length === 0) return [];
  const [first, last] = [x[0], x[x.length - 1]];
  if (first === last) return [first];
  const most = Math.max(2, Math.floor(width / 90));
  if (logarithmic) return x.filter((_, place) => place % Math.ceil(x.length / most) === 0);
  const size = (last - first) / most;
  const step = time ? [60, 300, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400].find((one) => one >= size) ?? 86400 : roundStep(size);
  const shift = time ? new Date(first * 1000).getTimezoneOffset() * 60 : 0;
  const ticks = [];
  for (let tick = Math.ceil((first - shift) / step) * step + shift; tick <= last; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

// Ticks without those that would be written over the one before.
function apart(ticks, xScale) {
  let former = -Infinity;
  return ticks.filter((value) => xScale(value) - former >= NAME_WIDTH && ((former = xScale(value)), true));
}

function path(x, values, xScale, yScale) {
  let drawn = "";
  let pen = "M";
  for (let place = 0; place < x.length; place++) {
    if (values[place] === null || values[place] === undefined) {
      pen = "M";
      continue;
    }
    drawn += `${pen}${xScale(x[place])} ${yScale(values[place])}`;
    if (pen === "M" && (values[place + 1] ?? null) === null) drawn += "h.1"; // a single point between gaps is seen too
    pen = "L";
  }
  return drawn;
}

function band(x, { low, high }, xScale, yScale) {
  const places = [...x.keys()].filter((place) => low[place] !== null && high[place] !== null);
  const upper = places.map((place) => `${xScale(x[place])} ${yScale(high[place])}`);
  const lower = places.map((place) => `${xScale(x[place])} ${yScale(low[place])}`).reverse();
  return places.length ? `M${upper.concat(lower).join("L")}Z` : "";
}

function nearest(positions, pixel) {
  let best = null;
  positions.forEach((position, place) => {
    if (best === null || Math.abs(position - pixel) < Math.abs(positions[best] - pixel)) best = place;
  });
  return best;
}

// Places of at most MOST_TABLE_ROWS of n rows, the last one among them.
function thinned(n) {
  const step = Math.max(1, Math.ceil(n / MOST_TABLE_ROWS));
  return Array.from({ length: Math.ceil(n / step) }, (_, place) => n - 1 - place * step).reverse();
}
