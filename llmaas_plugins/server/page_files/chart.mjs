// Charts of the page, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 58;
const [TOP, BOTTOM] = [10, 22];
const SHORTEST_S = 60;

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Return the smallest of 1, 2, 5, 10, 20, … that is at least `most`. */
export function roundUp(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 1e-9)));
  return power * [1, 2, 5, 10].find((step) => step * power >= most * 0.999999);
}

/** Return the running sums of series: pairs of lower and upper edges. */
function stack(series) {
  let lower = series[0]?.values.map(() => 0) ?? [];
  return series.map(({ color, values }) => {
    const upper = values.map((value, i) => lower[i] + value);
    const edges = { color, lower, upper };
    lower = upper;
    return edges;
  });
}

/**
 * Draw series over time: areas on top of each other, or lines.
 * `times` are Unix times in seconds, the last one now; each series has a color class and values.
 */
export function drawChart(svg, times, series, { stacked, format, least }) {
  const [width, height] = [svg.clientWidth || 300, svg.clientHeight || 176];
  const parts = stacked ? stack(series) : series.map(({ color, values }) => ({ color, upper: values }));
  const top = roundUp(Math.max(least, ...parts.flatMap((part) => part.upper)));
  const now = times.at(-1);
  const span = Math.max(SHORTEST_S, now - times[0]);
  const x = (time) => (width - 1 - ((now - time) / span) * (width - 1 - LEFT)).toFixed(1);
  const y = (value) => (height - BOTTOM - (value / top) * (height - BOTTOM - TOP)).toFixed(1);
  const path = (values) => values.map((value, i) => `${x(times[i])},${y(value)}`);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const drawn = [];
  for (const value of [0, top / 2, top]) {
    drawn.push(shape("line", { x1: LEFT, x2: width, y1: y(value), y2: y(value) }));
    drawn.push(shape("text", { x: LEFT - 8, y: Number(y(value)) + 4, "text-anchor": "end" }, format(value)));
  }
  const begin = span < 120 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`;
  drawn.push(shape("text", { x: LEFT, y: height - 5 }, begin));
  drawn.push(shape("text", { x: width - 1, y: height - 5, "text-anchor": "end" }, "now"));
  for (const { color, lower, upper } of parts) {
    const points = lower ? [...path(upper), ...path(lower).reverse()] : path(upper);
    drawn.push(shape(lower ? "polygon" : "polyline", { class: color, points: points.join(" ") }));
  }
  svg.replaceChildren(...drawn);
}

/** Draw parts of a whole as one bar; each part has a color class and an amount. */
export function drawBar(svg, parts, whole) {
  let start = 0;
  svg.toggleAttribute("hidden", whole === 0);
  const drawn = parts
    .filter(({ amount }) => amount > 0)
    .map(({ color, amount }) => {
      const share = whole > 0 ? Math.min(100 - start, (100 * amount) / whole) : 0;
      const part = shape("rect", { class: color, x: `${start}%`, width: `${share}%`, y: 0, height: "100%" });
      start += share;
      return part;
    });
  svg.replaceChildren(...drawn);
}
