// Charts: uPlot, loaded when the first one is shown, in the colours of the page, and the same figures as a table for screen readers.

import { html, useEffect, useRef, useState } from "./preact.js";

const MOST_TABLE_ROWS = 50;

// title      what is drawn
// x          ascending numbers; seconds since 1970 with time
// series     [{label, values (null: a gap), colour (1 to 5), dash, points, low, high}]; low and high are drawn as a band
// format     of a y value; xFormat, xLabel of x
// marks      [{x, label}]: vertical lines
// range      [low, high] of y; either may be null: by the data
export function Chart({ title, x, series, time = false, format = String, xFormat, xLabel, marks = [], range, height = 180, logarithmic = false }) {
  const place = useRef(null);
  const chart = useRef(null);
  const marked = useRef(marks);
  const [Plot, setPlot] = useState(() => loaded);
  const [scheme, setScheme] = useState(0);
  marked.current = marks;
  const data = [x, ...series.flatMap((one) => (one.low ? [one.values, one.low, one.high] : [one.values]))];
  const shape = JSON.stringify([series.map(({ label, colour, dash, points, low }) => [label, colour, dash, points, Boolean(low)]), range, height, scheme]);

  useEffect(() => {
    if (!Plot) load().then((uPlot) => setPlot(() => uPlot));
    return onScheme(() => setScheme((round) => round + 1));
  }, []);

  useEffect(() => {
    if (!Plot) return undefined;
    const options = optionsOf({ series, time, format, xFormat, range, height, logarithmic, marked, width: place.current.clientWidth || 300, element: place.current });
    const drawn = (chart.current = new Plot(options, data, place.current));
    const observer = new ResizeObserver(() => {
      const width = place.current?.clientWidth;
      if (width && width !== drawn.width) drawn.setSize({ width, height });
    });
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      drawn.destroy();
      chart.current = null;
    };
  }, [Plot, shape]);

  useEffect(() => chart.current?.setData(data), [data, marks]);

  const rows = thinned(x.length);
  return html`<figure class="chart">
    <figcaption>${title}
      <span class="legend">${series.length > 1 && series.map((one, at) => html`<span><i class=${`swatch series-${one.colour ?? at + 1}`}></i>${one.label}</span>`)}</span>
    </figcaption>
    <div ref=${place} aria-hidden="true" class="plot"></div>
    <div class="unseen"><table><caption>${title}</caption>
      <thead><tr><th scope="col">${xLabel ?? (time ? "Time" : "x")}</th>${series.map((one) => html`<th scope="col">${one.label}</th>`)}</tr></thead>
      <tbody>${rows.map((at) => html`<tr><th scope="row">${time ? new Date(x[at] * 1000).toISOString() : xFormat?.(x[at]) ?? x[at]}</th>
        ${series.map((one) => html`<td>${one.values[at] === null ? "unknown" : format(one.values[at])}</td>`)}</tr>`)}</tbody>
    </table></div>
  </figure>`;
}

let loaded = null;
let loading = null;

function load() {
  loading ??= new Promise((resolve, reject) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: new URL("../vendor/uplot.css", import.meta.url).href });
    const script = Object.assign(document.createElement("script"), { src: new URL("../vendor/uplot.js", import.meta.url).href });
    script.onload = () => resolve((loaded = globalThis.uPlot));
    script.onerror = () => {
      loading = null;
      reject(new Error("The drawing of charts could not be loaded."));
    };
    document.head.append(style, script);
  });
  return loading;
}

function optionsOf({ series, time, format, xFormat, range, height, logarithmic, marked, width, element }) {
  const colour = (name) => colourOf(element, name);
  const font = `11px ${getComputedStyle(element).fontFamily}`;
  const axis = { stroke: colour("--dim"), font, grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1, size: 4 } };
  const drawn = [{}];
  const bands = [];
  series.forEach((one, at) => {
    const stroke = colour(`--series-${one.colour ?? at + 1}`);
    drawn.push({ label: one.label, stroke, width: 1.5, dash: one.dash ? [4, 4] : undefined, points: { show: Boolean(one.points), size: 6, fill: stroke }, spanGaps: false });
    if (!one.low) return;
    const low = drawn.length;
    drawn.push({ label: `${one.label}, low`, stroke: "transparent", points: { show: false } }, { label: `${one.label}, high`, stroke: "transparent", points: { show: false } });
    bands.push({ series: [low + 1, low], fill: stroke.replace(/^rgb\(/, "rgba(").replace(/\)$/, ", 0.16)") });
  });
  return {
    width,
    height,
    series: drawn,
    bands,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time, distr: logarithmic ? 3 : 1 }, y: { range: range && ((_, low, high) => [range[0] ?? low, range[1] ?? high]) } },
    axes: [
      { ...axis, values: xFormat && ((_, values) => values.map((value) => (value === null ? "" : xFormat(value)))) },
      { ...axis, size: 52, values: (_, values) => values.map((value) => (value === null ? "" : format(value))) },
    ],
    hooks: { draw: [(plot) => drawMarks(plot, marked.current, colour("--dim"), font)], setCursor: [tooltip(series, format, xFormat, time)] },
  };
}

function drawMarks(plot, marks, stroke, font) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = stroke;
  ctx.setLineDash([2, 3]);
  ctx.font = font.replace("11px", `${11 * devicePixelRatio}px`);
  for (const { x, label } of marks) {
    const at = Math.round(plot.valToPos(x, "x", true));
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    if (label) ctx.fillText(label, at + 4, bbox.top + 12 * devicePixelRatio);
  }
  ctx.restore();
}

// A line of text above the drawing with the figures under the pointer.
function tooltip(series, format, xFormat, time) {
  const text = document.createElement("div");
  text.className = "tooltip";
  return (plot) => {
    if (!text.isConnected) plot.root.append(text);
    const at = plot.cursor.idx;
    text.hidden = at === null || at === undefined;
    if (text.hidden) return;
    const x = plot.data[0][at];
    const place = time ? new Date(x * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }) : (xFormat?.(x) ?? x);
    const column = (label) => plot.data[plot.series.findIndex((one) => one.label === label)][at];
    text.textContent = [place, ...series.map((one) => `${one.label} ${column(one.label) === null ? "–" : format(column(one.label))}`)].join(" · ");
  };
}

// A CSS colour as canvas reads it: light-dark() resolved.
function colourOf(element, name) {
  const probe = element.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function onScheme(listener) {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const observer = new MutationObserver(listener);
  media.addEventListener("change", listener);
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  return () => {
    media.removeEventListener("change", listener);
    observer.disconnect();
  };
}

// Places of at most MOST_TABLE_ROWS of n rows, the last one among them.
function thinned(n) {
  const step = Math.max(1, Math.ceil(n / MOST_TABLE_ROWS));
  return Array.from({ length: Math.ceil(n / step) }, (_, at) => n - 1 - at * step).reverse();
}
