// What a figure means: shown when somebody points at it, moves to it by keys, or touches it.

import { h } from "./dom.js";

const tip = h("div", { class: "tip", id: "tip", role: "tooltip", hidden: true });
let shown = null;

function show(element) {
  if (shown === element) return;
  hide();
  shown = element;
  tip.textContent = element.dataset.why;
  tip.hidden = false;
  element.setAttribute("aria-describedby", tip.id);
  const [box, own] = [element.getBoundingClientRect(), tip.getBoundingClientRect()];
  const left = Math.min(Math.max(box.left, 8), innerWidth - own.width - 8);
  const below = box.bottom + 6 + own.height < innerHeight;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(box.top - own.height - 6, 8)}px`;
}

function hide() {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  tip.hidden = true;
}

const explained = (target) => (target instanceof Element ? target.closest("[data-why]") : null);

/** Begins to explain whatever has `data-why`. */
export function explain() {
  document.body.append(tip);
  document.addEventListener("pointerover", (event) => {
    const found = explained(event.target);
    if (found) show(found);
    else if (shown && !tip.contains(event.target) && shown !== explained(document.activeElement)) hide();
  });
  document.addEventListener("focusin", (event) => {
    const found = explained(event.target);
    if (found && event.target.matches(":focus-visible")) show(found);
    else hide();
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Makes one stop of the Tab key of all that is explained in a group: arrow keys move within it. */
export function roving(group) {
  const items = () => [...group.querySelectorAll("[data-why]:not([hidden])")];
  group.addEventListener("keydown", (event) => {
    const all = items();
    const at = all.indexOf(event.target);
    const to = { Home: 0, End: all.length - 1 }[event.key] ?? (event.key in STEPS ? at + STEPS[event.key] : -1);
    if (at < 0 || !all[to]) return;
    all[at].tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
    event.preventDefault();
  });
  return () => {
    const all = items();
    const current = all.find((each) => each.tabIndex === 0) ?? all[0];
    for (const each of all) each.tabIndex = each === current ? 0 : -1;
  };
}
