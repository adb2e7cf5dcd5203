// The graph of a topology, laid out by dagre: components as boxes, streams as arrows with their rows.

import { Graph, layout } from "./vendor/dagre.esm.js";
import { compact, count, duration, h, s } from "./dom.js";

const KINDS = { spout: "reads the source", bolt: "transforms", committer: "writes in the commit phase, in order" };
const HIGH = 58;

/** `label` of an edge as transactions record their rows. */
export function edgeLabel(edge) {
  const stream = edge.stream === "default" ? "" : `/${edge.stream}`;
  return `${edge.source}${stream}->${edge.target}`;
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** `notes`: component -> the line below its name, and an explanation. `flows`: label of an edge -> text and explanation. */
export function draw(shape, notes, flows) {
  const narrow = matchMedia("(max-width: 640px)").matches;
  const graph = new Graph({ multigraph: true });
  graph.setGraph({ rankdir: narrow ? "TB" : "LR", nodesep: 24, ranksep: narrow ? 46 : 90, marginx: 12, marginy: 12 });
  const wide = (each) => Math.max(120, Math.min(24, Math.max(each.id.length, (notes[each.id]?.text ?? "").length * 0.86)) * 8.2 + 30);
  for (const each of shape.components) graph.setNode(each.id, { width: wide(each), height: HIGH });
  const known = new Set(shape.components.map((each) => each.id));
  shape.edges.forEach((edge, index) => {
    if (known.has(edge.source) && known.has(edge.target)) {
      graph.setEdge(edge.source, edge.target, { edge, width: 60, height: 16, labelpos: "c" }, String(index));
    }
  });
  layout(graph);
  const { width, height } = graph.graph();
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "graph",
    "aria-label": `Graph of ${count(shape.components.length)} components and ${count(shape.edges.length)} streams` });
  svg.append(s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    s("path", { d: "M0 0L8 4L0 8z", class: "arrow" }))));
  for (const each of graph.edges()) {
    const { points, edge, x, y } = graph.edge(each);
    const flow = flows[edgeLabel(edge)];
    const line = points.map((point, index) => `${index ? "L" : "M"}${point.x.toFixed(1)} ${point.y.toFixed(1)}`).join("");
    svg.append(s("g", { class: flow?.idle ? "edge idle" : "edge" },
      s("title", {}, `${edgeLabel(edge)}: ${edge.grouping}${flow ? `, ${flow.why}` : ""}`),
      s("path", { d: line, "marker-end": "url(#arrow)" }),
      flow ? s("text", { x, y: y - 5 }, flow.text) : null));
  }
  for (const each of shape.components) {
    const { x, y, width: w } = graph.node(each.id);
    const states = each.states?.length ? `, ${each.states.join(", ")}` : "";
    svg.append(s("g", { class: `node kind-${each.kind}`, transform: `translate(${(x - w / 2).toFixed(1)} ${(y - HIGH / 2).toFixed(1)})` },
      s("title", {}, `${each.id}: ${each.kind} ${each.class ?? ""}, ${KINDS[each.kind] ?? ""}${states}${notes[each.id]?.why ? `; ${notes[each.id].why}` : ""}`),
      s("rect", { width: w, height: HIGH, rx: each.kind === "spout" ? HIGH / 2 : 7 }),
      each.kind === "committer" ? s("rect", { x: 3.500, y: 3.500, width: w - 7, height: HIGH - 7, rx: 4, class: "inner" }) : null,
      s("text", { x: w / 2, y: 25, class: "name" }, cut(each.id, 24)),
      s("text", { x: w / 2, y: 43, class: "note" }, cut(notes[each.id]?.text ?? "", 28))));
  }
  return h("div", { class: "scroll canvas", tabindex: "0", role: "region", "aria-label": "Graph" }, svg);
}

/** How busy the tasks of each component were, beside what is said of it otherwise. */
export function notesOf(shape, edges, said) {
  const notes = {};
  for (const each of shape.components) {
    const text = said[each.id] || `${each.kind}${each.parallelism ? ` × ${each.parallelism}` : ""}`;
    const busy = edges?.busy_ms?.[each.id];
    if (!busy || !(edges.seconds > 0)) {
      notes[each.id] = { text };
      continue;
    }
    const share = `${Math.round(busy[1] / edges.seconds / 10)} %`;
    const last = busy[0] === null ? "" : `${duration(busy[0] / 1000)} in the last transaction, ${duration(busy[1] / 1000)} in the last ${count(edges.transactions)}; `;
    notes[each.id] = { text: `${text}, busy ${share}`, why: `${last}its tasks together were busy with it for ${share} of the time` };
  }
  return notes;
}

export function flowsOf(shape, edges) {
  const flows = {};
  for (const edge of shape.edges) {
    const rows = edges?.rows?.[edgeLabel(edge)];
    if (!rows) continue;
    const rate = edges.seconds > 0 ? rows[1] / edges.seconds : null;
    flows[edgeLabel(edge)] = {
      text: rate === null ? compact(rows[1]) : `${compact(rate)}/s`,
      idle: rows[1] === 0,
      why: rows[0] === null ? `${count(rows[1])} rows in ${duration(edges.seconds)}`
        : `${count(rows[0])} rows in the last transaction, ${count(rows[1])} in the last ${count(edges.transactions)}`,
    };
  }
  return flows;
}
