// Draws the nodes of one level along their keys. Nodes that share a column of pixels are drawn once, the darker the more they are, so a
// level costs no more than its width.

const HEIGHT = 20;
const CUT = 0.5; // where the cut is, as a share of the width

// The colours of now: those of a property with light-dark() are known of an element that has them.
export function colours(element) {
  const of = (name) => {
    element.style.color = `var(${name})`;
    return getComputedStyle(element).color;
  };
  return { kept: of("--accent"), dropped: of("--edge"), cut: of("--text"), good: of("--good"), bad: of("--bad") };
}

// level: with nodes and keys where they are known, else with cut and dropped alone; ancestor: with its key, or null.
export function draw(canvas, width, level, ancestor, colour) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${HEIGHT}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const keys = level.keys ?? [level.cut, level.dropped].filter((key) => key !== null);
  const at = scale(keys, ancestor?.key ?? null, level.cut, width);
  const columns = new Map();
  keys.forEach((key, place) => {
    const kept = place < (level.keys ? level.kept : 1);
    const column = at(key) * 2 + (kept ? 1 : 0);
    columns.set(column, (columns.get(column) ?? 0) + 1);
  });
  const most = Math.max(1, ...columns.values());
  for (const [column, nodes] of columns) {
    context.globalAlpha = 0.35 + 0.65 * Math.sqrt(nodes / most);
    context.fillStyle = column % 2 ? colour.kept : colour.dropped;
    context.fillRect(Math.floor(column / 2), 5, 1.5, HEIGHT - 10);
  }
  context.globalAlpha = 1;
  if (level.cut !== null && level.dropped !== null) {
    context.fillStyle = colour.cut;
    context.fillRect(Math.round(CUT * width), 1, 1, HEIGHT - 2);
  }
  if (ancestor?.key !== null && ancestor?.key !== undefined) diamond(context, at(ancestor.key), ancestor.kept ? colour.good : colour.bad);
}

// Key -> pixel: the cut in the middle; either side as wide as the farther key needs, by a root, so that what is near the cut is told apart.
function scale(keys, own, cut, width) {
  const middle = cut ?? keys[keys.length - 1] ?? 0;
  const all = own === null ? keys : [...keys, own];
  let reach = 0;
  for (const key of all) reach = Math.max(reach, Math.abs(key - middle));
  const room = CUT * width - 8;
  return (key) => {
    const away = reach > 0 ? Math.sqrt(Math.min(1, Math.abs(key - middle) / reach)) : 0;
    const side = key >= middle ? 2 : -2; // beside the line, not on it
    return Math.round(CUT * width + Math.sign(key - middle) * away * room + side);
  };
}

function diamond(context, x, fill) {
  context.fillStyle = fill;
  context.beginPath();
  context.moveTo(x, HEIGHT / 2 - 7);
  context.lineTo(x + 6, HEIGHT / 2);
  context.lineTo(x, HEIGHT / 2 + 7);
  context.lineTo(x - 6, HEIGHT / 2);
  context.fill();
}
