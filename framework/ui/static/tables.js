// Tables that change under the eyes of whoever reads them, and commands to copy.

import { h, say } from "./dom.js";
import { roving } from "./tips.js";

/** A table that changes in place: what somebody has focused, opened or selected stays as it is.
    `heads`: the name of each column, `why`, and whether it is a `number` or `wide`. */
export class Table {
  constructor(heads, label) {
    this.heads = heads;
    this.rows = new Map();
    this.body = h("tbody", {});
    const head = h("tr", {}, heads.map(({ name, number, why }) => h("th", { scope: "col", class: number && "number", "data-why": why }, name)));
    roving(head)();
    const whys = heads.filter(({ why }) => why).map(({ name, why }) => `${name}: ${why}.`);
    this.element = h("div", {}, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      h("table", {}, h("thead", {}, head), this.body)), whys.length ? h("p", { class: "why" }, whys.join(" ")) : null);
  }

  /** `rows`: a key, and what is in each cell. */
  update(rows) {
    const [before, focused] = [this.rows, document.activeElement];
    this.rows = new Map();
    for (const [key, cells] of rows) {
      const made = h("tr", {}, cells.map((cell, index) => {
        const { name, number, wide } = this.heads[index];
        return h("td", { class: [number && "number", wide && "wide"].filter(Boolean).join(" ") || null, "data-name": name }, cell);
      }));
      const known = before.get(key);
      if (known) [...made.cells].forEach((cell, index) => settle(known.cells[index], cell));
      this.rows.set(key, known ?? made);
    }
    for (const [key, row] of before) if (!this.rows.has(key)) row.remove();
    [...this.rows.values()].forEach((row, index) => {
      if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
    });
    // A row that moves loses the focus.
    if (this.body.contains(focused) && document.activeElement !== focused) focused.focus({ preventScroll: true });
    return this;
  }
}

/** Puts `now` in the place of `known` only if it is another, and open if that was open. */
function settle(known, now) {
  const [was, is] = [known.querySelector("details"), now.querySelector("details")];
  if (was && is) is.open = was.open;
  if (!known.isEqualNode(now)) known.replaceWith(now);
}

/** A table that does not change. */
export function table(heads, rows, label) {
  return new Table(heads, label).update(rows.map((cells, index) => [index, cells])).element;
}

/** A command to type, which a button copies where the browser allows it. */
export function command(text) {
  const copy = navigator.clipboard && h("button", { type: "button", class: "copy", "aria-label": `Copy ${text}`,
    onclick: async () => {
      await navigator.clipboard.writeText(text);
      say(copy, "copied");
      setTimeout(() => say(copy, "copy"), 1500);
    } }, "copy");
  return h("span", { class: "typed" }, h("code", { class: "command" }, text), copy);
}
