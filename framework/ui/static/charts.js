// Pictures of figures, as SVG: a few paths each, however many figures. D3 computes, and draws nothing.

import { area, bisectCenter, line, max, quantileSorted, scaleLinear, scaleLog, scaleTime } from "./d3.js";
import { compact, count, duration, fine, h, moment, plural, s, say } from "./dom.js";
import { roving } from "./tips.js";

const PHASES = [
  ["processing_ms", "processing", "phase-processing", "Reading the source and running the bolts"],
  ["waiting_ms", "waiting", "phase-waiting", "Processed, and waiting until the transactions before it are committed"],
  ["commit_ms", "commit", "phase-commit", "Writing to the sinks"],
];

const total = (row) => PHASES.reduce((sum, [name]) => sum + (row[name] ?? 0), 0);
const LEFT = 52;
const BOTTOM = 20;

/** A picture with axes that fits its place, and in which the pointer and the arrow keys choose a
    figure. A kind of chart says what there is to choose (`size`, `at`), where it is (`spot`) and what
    it says (`words`), and draws itself (`draw`). */
class Chart {
  constructor({ title, height, label, hint = "", style = "", roof = 8 }) {
    [this.height, this.roof, this.width, this.chosen, this.hint] = [height, roof, 0, null, hint];
    this.svg = s("svg", { role: "img", "aria-label": label, height });
    this.axes = s("g", { class: "axes", "aria-hidden": "true" });
    this.cursor = s("rect", { class: "cursor", y: roof, height: height - roof - BOTTOM, width: 0 });
    this.svg.append(this.axes, this.cursor);
    this.readout = h("p", { class: "readout", role: "status" }, hint);
    this.plot = h("div", { class: `plot ${style}`, tabindex: "0", role: "group", "aria-label": `${label}. Arrow keys move along it.` }, this.svg);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.plot.matches(":focus") || this.choose(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.element = h("div", { class: "chart" }, h("div", { class: "heading" }, h("h3", {}, title), this.readout), this.plot);
    new ResizeObserver(([{ contentRect }]) => this.resized(Math.floor(contentRect.width))).observe(this.plot);
  }

  resized(width) {
    if (width === this.width) return;
    this.width = width;
    this.svg.setAttribute("width", width);
    this.redraw();
  }

  /** Not while it is hidden. */
  redraw() {
    if (this.width < LEFT + 40) return;
    this.draw();
    if (this.chosen !== null) this.choose(Math.min(this.chosen, this.size() - 1));
  }

  point(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    this.choose(this.size() ? this.at(x) : null);
  }

  key(event) {
    const [at, last] = [this.chosen, this.size() - 1];
    const moves = { ArrowLeft: at === null ? last : at - 1, ArrowRight: at === null ? 0 : at + 1, Home: 0, End: last };
    if (!(event.key in moves) || last < 0) return;
    this.choose(Math.min(Math.max(moves[event.key], 0), last));
    event.preventDefault();
  }

  choose(index) {
    this.chosen = index !== null && index >= 0 && index < this.size() ? index : null;
    const [x, width] = this.chosen === null ? [0, 0] : this.spot(this.chosen);
    this.cursor.setAttribute("x", x);
    this.cursor.setAttribute("width", width);
    say(this.readout, this.chosen === null ? this.hint : this.words(this.chosen));
  }

  /** Ticks: pairs of a place and a text. */
  drawAxes(across, up) {
    const bottom = this.height - BOTTOM;
    this.axes.replaceChildren(
      ...up.map(([y, text]) => s("g", {}, s("line", { x1: LEFT, x2: this.width, y1: y, y2: y }), s("text", { x: LEFT - 6, y: y + 4, class: "end" }, text))),
      ...spaced(across, this.width).map(([x, anchor, text]) => s("text", { x, y: bottom + 15, class: anchor }, text)));
  }

  /** From 0 to a round value above `top`. */
  upwards(top) {
    return scaleLinear([0, top || 1], [this.height - BOTTOM, this.roof]).nice(3);
  }
}

/** Those of the ticks that have room side by side: where each stands, how, and its text. */
function spaced(ticks, width) {
  let free = LEFT;
  const found = [];
  for (const [x, text] of ticks) {
    const wide = text.length * 6.6;
    const anchor = x - wide / 2 < LEFT ? "start" : x + wide / 2 > width ? "end" : "middle";
    const from = x - wide * { start: 0, middle: 0.5, end: 1 }[anchor];
    if (x > width || from < free) continue;
    free = from + wide + 12;
    found.push([x, anchor, text]);
  }
  return found;
}

const ticksOf = (scale, wanted, format) => scale.ticks(wanted).map((each) => [scale(each), format(each)]);
/** Ticks of a figure; of one that is counted, whole numbers only. */
const figuresOf = (scale, counted) => ticksOf(scale, 3, fine).filter((_, index) => !counted || Number.isInteger(scale.ticks(3)[index]));
const countsOf = (scale) => scale.ticks(3).filter(Number.isInteger).map((each) => [scale(each), compact(each)]);
const column = (x, y, width, tall) => `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${(-tall).toFixed(1)}h${(-width).toFixed(1)}z`;

/** The last transactions, one stacked column each. `open` is called with a txid that was chosen. */
export class TimeLine extends Chart {
  constructor(open) {
    super({ title: "Time of the last transactions", height: 230, roof: 18, label: "Time of each of the last transactions; Enter opens one", style: "tall",
      hint: "Point at a column or use the arrow keys; click or press Enter to open the transaction." });
    this.rows = [];
    this.paths = PHASES.map(([, , style]) => s("path", { class: style }));
    [this.failed, this.cut] = [s("path", { class: "mark-failed" }), s("path", { class: "mark-cut" })];
    this.svg.append(...this.paths, this.failed, this.cut);
    const chosen = () => this.chosen !== null && open(this.rows[this.chosen].txid);
    this.plot.addEventListener("click", chosen);
    this.plot.addEventListener("keydown", (event) => event.key === "Enter" && chosen());
    const legend = h("ul", { class: "legend" },
      PHASES.map(([, name, style, why]) => h("li", { "data-why": why }, h("span", { class: `swatch ${style}` }), name)),
      this.replayed = h("li", { "data-why": "It took more than one attempt" }, h("span", { class: "swatch mark-failed" }), "▾ replayed"),
      this.longer = h("li", { "data-why": "It took longer than the axis goes: one slow transaction must not press all others flat" }, h("span", { class: "swatch mark-cut" }), "longer than shown"));
    roving(legend)();
    this.plot.before(legend);
    this.plot.after(this.readout);
  }

  update(rows) {
    const txid = this.rows[this.chosen]?.txid;
    this.rows = rows;
    if (txid !== undefined) this.chosen = rows.findIndex((row) => row.txid === txid);
    this.redraw();
  }

  size() { return this.rows.length; }

  step() { return (this.width - LEFT) / Math.max(this.rows.length, 40); }

  at(x) { return Math.min(Math.max(Math.floor((x - LEFT) / this.step()), 0), this.size() - 1); }

  spot(index) { return [LEFT + index * this.step(), Math.max(this.step(), 2)]; }

  draw() {
    const times = this.rows.map(total).sort((a, b) => a - b);
    const most = Math.min(times.at(-1) ?? 1, (quantileSorted(times, 0.99) || 1) * 2);
    const up = this.upwards(most / 1000);
    const [bottom, step] = [this.height - BOTTOM, this.step()];
    const wide = Math.max(step - (step > 4 ? 1 : 0), 0.5);
    const shapes = PHASES.map(() => []);
    const [failed, cut] = [[], []];
    this.rows.forEach((row, index) => {
      const x = LEFT + index * step;
      let y = bottom;
      PHASES.forEach(([name], phase) => {
        const tall = Math.min(bottom - up((row[name] ?? 0) / 1000), y - this.roof);
        if (tall > 0.05) shapes[phase].push(column(x, y, wide, tall));
        y -= Math.max(tall, 0);
      });
      if (total(row) / 1000 > up.domain()[1]) cut.push(column(x, this.roof + 3, Math.max(wide, 2), 3));
      if (row.attempts > 1) failed.push(`M${(x + wide / 2 - 4).toFixed(1)} 4h8l-4 8z`);
    });
    this.paths.forEach((path, phase) => path.setAttribute("d", shapes[phase].join("")));
    this.failed.setAttribute("d", failed.join(""));
    this.cut.setAttribute("d", cut.join(""));
    [this.replayed.hidden, this.longer.hidden] = [!failed.length, !cut.length];
    const across = [];
    for (let index = 0; index < this.rows.length; index += Math.ceil(90 / step)) {
      if (this.rows[index].closed_at) across.push([LEFT + index * step, moment(this.rows[index].closed_at)]);
    }
    this.drawAxes(across, ticksOf(up, 4, duration));
  }

  words(index) {
    const row = this.rows[index];
    const times = PHASES.map(([name, word]) => `${word} ${duration((row[name] ?? 0) / 1000)}`).join(", ");
    const rate = total(row) ? `, ${compact(row.rows / (total(row) / 1000))} rows/s` : "";
    const tried = row.attempts > 1 ? `, ${row.attempts} attempts: ${row.reason}` : "";
    return `Transaction ${count(row.txid)} at ${moment(row.closed_at)}: ${times}, ${plural(row.rows, "row")}${rate}${tried}`;
  }
}

const SHARES = [["p50", 0.5, "Half of them took at most so long"], ["p95", 0.95, "95 of 100 took at most so long"],
  ["p99", 0.99, "99 of 100 took at most so long"], ["longest", 1, "The longest of them"]];
const GROWTH = 1.3;

/** How many took how long: columns that grow by a third each. `what`: one of those that are counted. */
export class Histogram extends Chart {
  constructor(title, label, what) {
    super({ title, height: 130, label });
    this.what = what;
    [this.times, this.bins, this.first] = [[], [], 0];
    this.path = s("path", { class: "bars" });
    this.svg.append(this.path);
    this.values = SHARES.map(() => h("dd", {}));
    const values = h("dl", { class: "quantiles" }, SHARES.map(([name, , why], index) => h("div", { "data-why": why }, h("dt", {}, name), this.values[index])));
    roving(values)();
    this.plot.before(values);
  }

  /** `times`: in milliseconds. */
  update(times) {
    this.times = times.filter((each) => each !== null && each !== undefined && each >= 0).sort((a, b) => a - b);
    const bin = (value) => Math.floor(Math.log(Math.max(value, 0.1)) / Math.log(GROWTH));
    this.first = this.times.length ? bin(this.times[0]) : 0;
    this.bins = Array(this.times.length ? Math.max(bin(this.times.at(-1)) - this.first + 1, 8) : 0).fill(0);
    for (const each of this.times) this.bins[bin(each) - this.first] += 1;
    SHARES.forEach(([, share], index) => say(this.values[index], this.times.length ? duration(quantileSorted(this.times, share) / 1000) : "none"));
    this.redraw();
  }

  size() { return this.bins.length; }

  edge(index) { return GROWTH ** (this.first + index); }

  scale() { return scaleLog([this.edge(0), this.edge(Math.max(this.size(), 1))], [LEFT, this.width]); }

  at(x) { return Math.min(Math.max(Math.floor(((x - LEFT) / (this.width - LEFT)) * this.size()), 0), this.size() - 1); }

  spot(index) { return [LEFT + (index * (this.width - LEFT)) / this.size(), (this.width - LEFT) / this.size()]; }

  draw() {
    const up = this.upwards(max(this.bins));
    const bottom = this.height - BOTTOM;
    this.path.setAttribute("d", this.bins.map((each, index) => {
      const [x, width] = this.spot(index);
      return each ? column(x, bottom, Math.max(width - 2, 1), Math.max(bottom - up(each), 1.5)) : "";
    }).join(""));
    const scale = this.scale();
    const across = scale.ticks().filter((each) => /^[125]/.test(each.toExponential())).map((each) => [scale(each), duration(each / 1000)]);
    this.drawAxes(this.size() ? across : [], countsOf(up));
  }

  words(index) {
    return `${plural(this.bins[index], this.what)} from ${duration(this.edge(index) / 1000)} to ${duration(this.edge(index + 1) / 1000)}`;
  }
}

/** A figure over time. `points`: pairs of seconds since the epoch and a value. */
export class Trend extends Chart {
  constructor(title, unit, most = 600) {
    super({ title, height: 130, label: title });
    [this.unit, this.most, this.points] = [unit, most, []];
    this.paths = [s("path", { class: "trend-area" }), s("path", { class: "trend-line" })];
    this.svg.append(...this.paths);
  }

  add(at, value) {
    if (value === null || value === undefined || this.points.at(-1)?.[0] === at) return;
    this.update([...this.points, [at, value]].slice(-this.most));
  }

  update(points) {
    this.points = points;
    this.redraw();
  }

  size() { return this.points.length; }

  scale() {
    const [from, to] = [this.points[0]?.[0] ?? 0, this.points.at(-1)?.[0] ?? 0];
    return scaleTime([from * 1000, Math.max(to, from + 10) * 1000], [LEFT, this.width - 2]);
  }

  at(x) { return bisectCenter(this.points.map(([at]) => at), this.scale().invert(x).getTime() / 1000); }

  spot(index) { return [this.scale()(this.points[index][0] * 1000) - 1, 2]; }

  draw() {
    const [across, up] = [this.scale(), this.upwards(max(this.points, ([, value]) => value))];
    const x = ([at]) => across(at * 1000);
    const y = ([, value]) => up(value);
    this.paths[0].setAttribute("d", area().x(x).y0(this.height - BOTTOM).y1(y)(this.points) ?? "");
    this.paths[1].setAttribute("d", line().x(x).y(y)(this.points) ?? "");
    this.drawAxes(this.points.length ? ticksOf(across, Math.max(Math.floor(this.width / 110), 2), (each) => moment(each / 1000)) : [], figuresOf(up, this.points.every(([, value]) => Number.isInteger(value))));
  }

  words(index) {
    const [at, value] = this.points[index];
    return `${fine(value)} ${this.unit} at ${moment(at)}`;
  }

  /** Change per second over the last half minute; null while that is not known. */
  slope() {
    const [at, value] = this.points.at(-1) ?? [];
    const earlier = this.points.find(([when]) => when >= at - 30);
    return earlier && at - earlier[0] >= 5 ? (value - earlier[1]) / (at - earlier[0]) : null;
  }
}

/** Every partition as a column, taller the more it lags. */
export class Strip extends Chart {
  constructor() {
    super({ title: "Lag by partition, in records", height: 110, label: "Lag of each partition", style: "strip" });
    this.all = [];
    this.paths = [s("path", { class: "bars" }), s("path", { class: "unknown" })];
    this.svg.append(...this.paths);
  }

  update(all) {
    this.all = all;
    this.redraw();
  }

  size() { return this.all.length; }

  step() { return Math.min((this.width - LEFT) / Math.max(this.size(), 1), 48); }

  at(x) { return Math.min(Math.max(Math.floor((x - LEFT) / this.step()), 0), this.size() - 1); }

  spot(index) { return [LEFT + index * this.step(), Math.max(this.step(), 2)]; }

  draw() {
    const most = max(this.all, ([, lag]) => lag) || 1;
    const [up, bottom, step] = [this.upwards(most), this.height - BOTTOM, this.step()];
    const wide = Math.max(step - (step > 4 ? 1 : 0), 0.5);
    const [known, unknown] = [[], []];
    this.all.forEach(([, lag], index) => {
      const x = LEFT + index * step;
      if (lag === null) unknown.push(column(x, bottom, wide, 8));
      else known.push(column(x, bottom, wide, Math.max(bottom - up(lag), lag > 0 ? 2 : 0.7)));
    });
    this.paths[0].setAttribute("d", known.join(""));
    this.paths[1].setAttribute("d", unknown.join(""));
    const across = this.all.map(([name], index) => [LEFT + (index + 0.5) * step, name.length > 16 ? `…${name.slice(-15)}` : name]);
    this.drawAxes(across, countsOf(up));
  }

  words(index) {
    const [name, lag] = this.all[index];
    return `${name}: ${lag === null ? "lag unknown" : `${plural(lag, "record")} behind`}`;
  }
}

/** A figure's last minutes, small enough for a cell of a table. */
export function spark(points, label) {
  const [width, height] = [84, 20];
  const across = scaleLinear([points[0][0], points.at(-1)[0]], [1, width - 1]);
  const up = scaleLinear([0, max(points, ([, value]) => value) || 1], [height - 1, 2]);
  return s("svg", { class: "spark", width, height, role: "img", "aria-label": label },
    s("path", { class: "trend-line", d: line().x(([at]) => across(at).toFixed(1)).y(([, value]) => up(value).toFixed(1))(points) }));
}
