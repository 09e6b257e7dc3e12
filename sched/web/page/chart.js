// A line chart over the last five minutes in plain SVG, with a cross-hair.

import { plain, text } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const SPAN = 300;
const PAD = { left: 42, right: 8, top: 8, bottom: 20 };

function shape(tag, attributes, parent) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.append(node);
  return node;
}

// Ticks of an axis, and the part of its height a value has. The top is 1, 2 or 5 times a power of
// ten, not below any value.
function linear(values) {
  const most = Math.max(1, ...values);
  const unit = 10 ** Math.floor(Math.log10(most));
  const top = [1, 2, 5, 10].map((m) => m * unit).find((m) => m >= most * 0.9999);
  return [[0, top / 2, top], (v) => v / top];
}

// Whole decades that hold all values, two at least.
function decadesOf(values) {
  const low = Math.floor(Math.log10(Math.max(1e-3, Math.min(10, ...values))));
  const high = Math.max(low + 2, Math.ceil(Math.log10(Math.max(1e-3, ...values)) - 1e-9));
  const ticks = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
  return [ticks, (v) => Math.max(0, (Math.log10(Math.max(v, 1e-9)) - low) / (high - low))];
}

export class Chart {
  // series: names of CSS classes, drawn in order; say(values) describes a moment in words;
  // decades: a logarithmic axis, for values of which the rare large ones matter.
  constructor(svg, series, say, decades = false) {
    this.svg = svg;
    this.series = series;
    this.say = say;
    this.decades = decades;
    this.rows = [];
    this.last = 0;
    this.hover = null;
    svg.addEventListener("pointermove", (e) => this.point(e.offsetX));
    svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  // rows: one array of values (or null) for each second; the last is second `last`.
  show(rows, last) {
    this.rows = rows;
    this.last = last;
    this.draw();
  }

  point(x) {
    this.hover = x;
    this.draw();
  }

  draw() {
    const { svg, rows } = this;
    const width = svg.clientWidth, height = svg.clientHeight;
    if (!width || !height) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const w = width - PAD.left - PAD.right, h = height - PAD.top - PAD.bottom;
    const values = rows.flat().filter((v) => v != null);
    const x = (i) => PAD.left + (w * (SPAN - rows.length + i + 0.5)) / SPAN;
    const [ticks, part] = this.decades ? decadesOf(values) : linear(values);
    const y = (v) => PAD.top + h * (1 - part(v));
    for (const tick of ticks) {
      const at = Math.round(y(tick)) + 0.5;
      shape("line", { x1: PAD.left, x2: width - PAD.right, y1: at, y2: at, class: "grid" }, svg);
      const label = shape("text", { x: PAD.left - 6, y: at + 4, class: "tick end" }, svg);
      text(label, plain(tick));
    }
    for (const [minutes, anchor] of [[5, "start"], [2.5, "middle"], [0, "end"]]) {
      const at = PAD.left + w * (1 - minutes / 5);
      const label = shape("text", { x: at, y: height - 5, class: `tick ${anchor}` }, svg);
      text(label, minutes ? `−${minutes} min` : "now");
    }
    const floor = PAD.top + h;
    this.series.forEach((name, s) => this.line(name, rows.map((row) => row[s]), x, y, s ? null : floor));
    this.cross(x, y, w, floor);
    const latest = rows.at(-1);
    svg.setAttribute("aria-label", latest ? `now ${this.say(latest)}` : "no values yet");
  }

  // `floor`: where the area under the line ends; null: no area.
  line(name, values, x, y, floor) {
    let path = "", area = "", run = [];
    const close = () => {
      if (!run.length) return;
      const points = run.map(([i, v]) => `${x(i).toFixed(1)} ${y(v).toFixed(1)}`);
      path += `M${points.join("L")}${run.length === 1 ? "h.1" : ""}`;
      const from = x(run[0][0]).toFixed(1), to = x(run.at(-1)[0]).toFixed(1);
      area += `M${from} ${floor}L${points.join("L")}L${to} ${floor}Z`;
      run = [];
    };
    values.forEach((v, i) => (v == null ? close() : run.push([i, v])));
    close();
    if (floor != null && area) shape("path", { d: area, class: `area ${name}` }, this.svg);
    if (path) shape("path", { d: path, class: `line ${name}` }, this.svg);
  }

  cross(x, y, w, floor) {
    if (this.hover == null || !this.rows.length) return;
    const exact = ((this.hover - PAD.left) / w) * SPAN - (SPAN - this.rows.length);
    const i = Math.max(0, Math.min(this.rows.length - 1, Math.floor(exact)));
    const row = this.rows[i], at = x(i);
    shape("line", { x1: at, x2: at, y1: PAD.top, y2: floor, class: "cross" }, this.svg);
    row.forEach((v, s) => {
      if (v != null) shape("circle", { cx: at, cy: y(v), r: 3.5, class: `dot ${this.series[s]}` }, this.svg);
    });
    const ago = this.rows.length - 1 - i;
    const left = at < PAD.left + w / 2;
    const place = { x: at + (left ? 8 : -8), y: PAD.top + 12, class: `tip ${left ? "start" : "end"}` };
    text(shape("text", place, this.svg), `${this.say(row)}, ${ago ? `${ago} s ago` : "now"}`);
  }
}
