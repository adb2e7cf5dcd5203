// Pictures of figures, as SVG: a few paths each, however many figures.

import { compact, count, duration, h, moment, plural, s, say } from "./dom.js";

const PHASES = [
  ["processing_ms", "processing", "phase-processing", "reading the source and running the bolts"],
  ["waiting_ms", "waiting", "phase-waiting", "processed, waiting until the transactions before it are committed"],
  ["commit_ms", "commit", "phase-commit", "writing to the sinks"],
];

const total = (row) => PHASES.reduce((sum, [name]) => sum + (row[name] ?? 0), 0);

function frame(width, height, label) {
  return s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, preserveAspectRatio: "none" });
}

/** The upper end of an axis: a round number. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((each) => each * power).find((each) => each >= value * 0.999999);
}

const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];

/** The last transactions, one stacked column each. `open` is called with a txid that was chosen. */
export class TimeLine {
  constructor(open) {
    this.width = 1000;
    this.height = 220;
    this.rows = [];
    this.svg = frame(this.width, this.height, "Time of each of the last transactions");
    this.paths = PHASES.map(([, , style]) => s("path", { class: style }));
    this.failed = s("path", { class: "mark-failed" });
    this.cursor = s("rect", { class: "cursor", y: 0, height: this.height, width: 0 });
    this.svg.append(this.cursor, ...this.paths, this.failed);
    this.top = h("span", { class: "axis" });
    this.left = h("span", {});
    this.right = h("span", {});
    this.readout = h("p", { class: "readout", role: "status" }, "Point at a column, or use the arrow keys.");
    this.plot = h("div", { class: "plot tall", tabindex: "0", role: "group",
      "aria-label": "Time line. Arrow keys move between transactions, Enter opens one." }, this.top, this.svg);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("click", () => this.chosen && open(this.chosen.txid));
    this.plot.addEventListener("keydown", (event) => this.key(event, open));
    this.element = h("div", {}, this.legend(), this.plot, h("div", { class: "ends" }, this.left, this.right), this.readout);
  }

  legend() {
    const entries = PHASES.map(([, name, style, why]) => h("li", { title: why }, h("span", { class: `swatch ${style}` }), name));
    return h("ul", { class: "legend" }, entries, h("li", { title: "took more than one attempt" },
      h("span", { class: "swatch mark-failed" }), "replayed (tick above)"));
  }

  update(rows) {
    this.rows = rows;
    const times = rows.map(total).sort((a, b) => a - b);
    // One slow transaction must not press all others flat.
    const top = ceiling(Math.max(quantile(times, 0.99) * 1.3 || 1, Math.min(times.at(-1) ?? 1, (quantile(times, 0.99) || 1) * 3)));
    const step = this.width / Math.max(rows.length, 40);
    const gap = step > 4 ? 1 : 0;
    const shapes = PHASES.map(() => []);
    const marks = [];
    rows.forEach((row, index) => {
      const x = index * step;
      let y = this.height;
      PHASES.forEach(([name], phase) => {
        const tall = Math.min(((row[name] ?? 0) / top) * (this.height - 12), y - 12);
        if (tall > 0.05) shapes[phase].push(`M${x.toFixed(2)} ${y.toFixed(2)}h${(step - gap).toFixed(2)}v${(-tall).toFixed(2)}h${(gap - step).toFixed(2)}z`);
        y -= Math.max(tall, 0);
      });
      if (row.attempts > 1) marks.push(`M${x.toFixed(2)} 0h${Math.max(step - gap, 2).toFixed(2)}v8h${(-Math.max(step - gap, 2)).toFixed(2)}z`);
    });
    this.paths.forEach((path, phase) => path.setAttribute("d", shapes[phase].join("")));
    this.failed.setAttribute("d", marks.join(""));
    this.step = step;
    say(this.top, duration(top / 1000));
    say(this.left, rows.length ? `${count(rows[0].txid)}, ${moment(rows[0].closed_at)}` : "");
    say(this.right, rows.length ? `${count(rows.at(-1).txid)}, ${moment(rows.at(-1).closed_at)}` : "");
    if (this.chosen) this.choose(rows.findIndex((row) => row.txid === this.chosen.txid));
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    this.choose(Math.floor(((event.clientX - box.left) / box.width) * this.width / this.step));
  }

  key(event, open) {
    const at = this.rows.indexOf(this.chosen);
    const moves = { ArrowLeft: at < 0 ? this.rows.length - 1 : at - 1, ArrowRight: at < 0 ? 0 : at + 1, Home: 0, End: this.rows.length - 1 };
    if (event.key in moves) this.choose(Math.min(Math.max(moves[event.key], 0), this.rows.length - 1));
    else if (event.key === "Enter" && this.chosen) open(this.chosen.txid);
    else return;
    event.preventDefault();
  }

  choose(index) {
    const row = this.rows[index];
    this.chosen = row;
    this.cursor.setAttribute("width", row ? Math.max(this.step, 2) : 0);
    if (!row) return;
    this.cursor.setAttribute("x", index * this.step);
    const times = PHASES.map(([name, word]) => `${word} ${duration((row[name] ?? 0) / 1000)}`).join(", ");
    const rate = total(row) ? `, ${compact(row.rows / (total(row) / 1000))} rows/s` : "";
    const tried = row.attempts > 1 ? `, ${row.attempts} attempts: ${row.reason}` : "";
    say(this.readout, `Transaction ${count(row.txid)} at ${moment(row.closed_at)}: ${times}, ${plural(row.rows, "row")}${rate}${tried}`);
  }
}

/** How long transactions take: a histogram over columns that grow by a third each. */
export class Histogram {
  constructor() {
    this.width = 400;
    this.height = 120;
    this.svg = frame(this.width, this.height, "Histogram of the time of the last transactions");
    this.path = s("path", { class: "phase-processing" });
    this.svg.append(this.path);
    this.words = h("dl", { class: "quantiles" });
    this.low = h("span", {});
    this.high = h("span", {});
    this.element = h("div", {}, this.words, h("div", { class: "plot" }, this.svg), h("div", { class: "ends" }, this.low, this.high));
  }

  update(rows) {
    const times = rows.map(total).filter((each) => each > 0).sort((a, b) => a - b);
    const named = [["half within", 0.5], ["95 of 100 within", 0.95], ["99 of 100 within", 0.99], ["longest", 1]];
    this.words.replaceChildren(...named.map(([name, share]) => h("div", {}, h("dt", {}, name),
      h("dd", {}, times.length ? duration(quantile(times, share) / 1000) : "unknown"))));
    if (!times.length) return;
    const bin = (value) => Math.floor(Math.log(Math.max(value, 0.1)) / Math.log(1.3));
    const first = bin(times[0]);
    const bins = Array(Math.max(bin(times.at(-1)) - first + 1, 8)).fill(0);
    for (const each of times) bins[bin(each) - first] += 1;
    const most = Math.max(...bins);
    const step = this.width / bins.length;
    this.path.setAttribute("d", bins.map((each, index) => each
      ? `M${(index * step).toFixed(1)} ${this.height}h${(step - 2).toFixed(1)}v${(-Math.max((each / most) * this.height, 1.5)).toFixed(1)}h${(2 - step).toFixed(1)}z` : "").join(""));
    say(this.low, duration(1.3 ** first / 1000));
    say(this.high, duration(1.3 ** (first + bins.length) / 1000));
  }
}

/** A figure since the page was opened. */
export class Trend {
  constructor(label, most = 600) {
    this.most = most;
    this.points = [];
    this.svg = frame(600, 80, label);
    this.area = s("path", { class: "trend-area" });
    this.line = s("path", { class: "trend-line", "vector-effect": "non-scaling-stroke" });
    this.svg.append(this.area, this.line);
    this.top = h("span", { class: "axis" });
    this.span = h("span", {});
    this.element = h("div", {}, h("div", { class: "plot low" }, this.top, this.svg),
      h("div", { class: "ends" }, this.span, h("span", {}, "now")));
  }

  add(at, value) {
    if (value === null || value === undefined || this.points.at(-1)?.[0] === at) return;
    this.points.push([at, value]);
    if (this.points.length > this.most) this.points.shift();
    const [from, to] = [this.points[0][0], at];
    const top = ceiling(Math.max(...this.points.map(([, each]) => each)));
    const shown = this.points.map(([when, each]) =>
      `${(to > from ? ((when - from) / (to - from)) * 600 : 600).toFixed(1)} ${(80 - (each / top) * 76).toFixed(1)}`);
    this.line.setAttribute("d", `M${this.points.length > 1 ? "" : `0 ${shown[0].split(" ")[1]}L`}${shown.join("L")}`);
    this.area.setAttribute("d", `M${to > from ? shown[0].split(" ")[0] : 0} 80L${to > from ? "" : `0 ${shown[0].split(" ")[1]}L`}${shown.join("L")}L600 80z`);
    say(this.top, compact(top));
    say(this.span, `${duration(Math.max(to - from, 1))} ago`);
  }

  /** Change per second over the last half minute; null while that is not known. */
  slope() {
    const [at, value] = this.points.at(-1) ?? [];
    const earlier = this.points.find(([when]) => when >= at - 30);
    return earlier && at - earlier[0] >= 5 ? (value - earlier[1]) / (at - earlier[0]) : null;
  }
}

/** Every partition as a cell, darker and taller the more it lags. */
export class Strip {
  constructor() {
    this.readout = h("p", { class: "readout", role: "status" }, "Point at a partition.");
    this.holder = h("div", { class: "plot low strip" });
    this.holder.addEventListener("pointermove", (event) => this.point(event));
    this.element = h("div", {}, this.holder, this.readout);
  }

  update(all) {
    this.all = all;
    const most = Math.max(...all.map(([, lag]) => lag ?? 0), 1);
    const svg = frame(1000, 80, `Lag of each of ${count(all.length)} partitions, at most ${count(most)} records`);
    const step = 1000 / Math.max(all.length, 1);
    const gap = step > 4 ? 1 : 0;
    const shapes = { known: [], unknown: [] };
    all.forEach(([, lag], index) => {
      const tall = lag === null ? 6 : Math.max((lag / most) * 76, lag > 0 ? 3 : 1);
      shapes[lag === null ? "unknown" : "known"].push(`M${(index * step).toFixed(2)} 80h${(step - gap).toFixed(2)}v${(-tall).toFixed(2)}h${(gap - step).toFixed(2)}z`);
    });
    svg.append(s("path", { class: "phase-commit", d: shapes.known.join("") }), s("path", { class: "unknown", d: shapes.unknown.join("") }));
    this.step = step;
    this.holder.replaceChildren(h("span", { class: "axis" }, compact(most)), svg);
  }

  point(event) {
    const box = this.holder.getBoundingClientRect();
    const found = this.all?.[Math.floor(((event.clientX - box.left) / box.width) * 1000 / this.step)];
    if (found) say(this.readout, `${found[0]}: ${found[1] === null ? "lag unknown" : `${plural(found[1], "record")} behind`}`);
  }
}
