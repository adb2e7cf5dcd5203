// Makes elements and words. Data becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

/** Changes the text of an element only if it is another: whoever listens is not told twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Calls `draw` only when what it depends on has changed. */
export function changed() {
  let before;
  return (value, draw) => {
    const now = JSON.stringify(value);
    if (now === before) return;
    before = now;
    draw();
  };
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export function count(value) {
  return value === null || value === undefined ? "unknown" : whole.format(value);
}

export function compact(value) {
  if (value === null || value === undefined) return "unknown";
  return Math.abs(value) < 10000 ? whole.format(value) : short.format(value);
}

/** As `compact`, with the first two digits of what is below 10 and no whole number. */
export function fine(value) {
  return Math.abs(value) < 10 && !Number.isInteger(value) ? String(Number(value.toPrecision(2))) : compact(value);
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** A duration of seconds, in the unit that people would take. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1).replace(".0", "")} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1).replace(".0", "")} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** How long ago, in whole seconds: nobody reads more of a figure that runs. */
export function ago(seconds) {
  return seconds < 2 ? "just now" : `${duration(Math.round(seconds)).replace(".0", "")} ago`;
}

export function moment(at) {
  return at === null || at === undefined ? "" : new Date(at * 1000).toLocaleTimeString("en-GB");
}

/** The time, with its day if that is not today. */
export function when(at) {
  if (at === null || at === undefined) return "";
  return clock.now() - at < 43200 ? moment(at) : day(at);
}

export function day(at) {
  return at === null || at === undefined ? "" : new Date(at * 1000).toLocaleString("en-GB");
}

/** The clock of the server: that of this machine may be wrong. */
export const clock = {
  behind: 0,
  set(at) {
    if (at) this.behind = Date.now() / 1000 - at;
  },
  now() {
    return Date.now() / 1000 - this.behind;
  },
  since(at) {
    return at === null || at === undefined ? null : Math.max(this.now() - at, 0);
  },
};

export const SIGNS = {
  running: "●", waiting: "◐", starting: "○", standby: "◌", led: "○", stopped: "■", finished: "✔", failed: "✕", unreadable: "✕",
};

/** A state as a sign and a word, so that it can be read without colour. */
export function badge(state) {
  const word = String(state);
  return h("span", { class: `badge state-${SIGNS[word] ? word : "unknown"}` },
    h("span", { "aria-hidden": "true" }, `${SIGNS[word] ?? "?"} `), word);
}
