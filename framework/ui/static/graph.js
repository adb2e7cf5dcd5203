// The graph of a topology, laid out by dagre: components as boxes, streams as arrows with their rows.

import { Graph, layout } from "./vendor/dagre.esm.js";
import { curveBasis, line } from "./d3.js";
import { compact, count, duration, h, s } from "./dom.js";

const KINDS = { spout: "reads the source", bolt: "transforms", committer: "writes in the commit phase, in order" };
const HIGH = 62;
/** A graph that is wider than its place is drawn smaller, down to this; then it is scrolled. */
const SMALLEST = 0.62;
const curved = line().x((point) => point.x).y((point) => point.y).curve(curveBasis);

/** `label` of an edge as transactions record their rows. */
export function edgeLabel(edge) {
  const stream = edge.stream === "default" ? "" : `/${edge.stream}`;
  return `${edge.source}${stream}->${edge.target}`;
}

function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** `notes`: component -> the line below its name, how busy each of its tasks is (0 to 1), and an
    explanation. `flows`: label of an edge -> text and explanation. `room`: how wide it may be.
    Returns the box that holds the graph, and where to scroll it to begin with: to the spout. */
export function draw(shape, notes, flows, room) {
  const narrow = room < 640;
  const graph = new Graph({ multigraph: true });
  graph.setGraph({ rankdir: narrow ? "TB" : "LR", nodesep: 20, ranksep: narrow ? 46 : 84, marginx: 12, marginy: 12 });
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
  const scale = Math.min(Math.max((room - 4) / width, SMALLEST), 1);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width: Math.floor(width * scale), height: Math.floor(height * scale), role: "img", class: "graph",
    "aria-label": `Graph of ${count(shape.components.length)} components and ${count(shape.edges.length)} streams` });
  svg.append(s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    s("path", { d: "M0 0L8 4L0 8z", class: "arrow" }))));
  for (const each of graph.edges()) {
    const { points, edge, x, y } = graph.edge(each);
    const flow = flows[edgeLabel(edge)];
    svg.append(s("g", { class: flow?.idle ? "edge idle" : "edge" },
      s("title", {}, `${edgeLabel(edge)}: ${edge.grouping}${flow ? `, ${flow.why}` : ""}`),
      s("path", { d: curved(points), "marker-end": "url(#arrow)" }),
      flow ? s("text", { x, y: y - 5 }, flow.text) : null));
  }
  for (const each of shape.components) {
    const { x, y, width: w } = graph.node(each.id);
    const states = each.states?.length ? `, ${each.states.join(", ")}` : "";
    const note = notes[each.id] ?? {};
    const busy = Math.min(note.busy ?? 0, 1);
    svg.append(s("g", { class: `node kind-${each.kind}`, transform: `translate(${(x - w / 2).toFixed(1)} ${(y - HIGH / 2).toFixed(1)})` },
      s("title", {}, `${each.id}: ${each.kind} ${each.class ?? ""}, ${KINDS[each.kind] ?? ""}${states}${note.why ? `; ${note.why}` : ""}`),
      s("rect", { width: w, height: HIGH, rx: each.kind === "spout" ? HIGH / 2 : 7 }),
      each.kind === "committer" ? s("rect", { x: 3.500, y: 3.500, width: w - 7, height: HIGH - 7, rx: 4, class: "inner" }) : null,
      s("text", { x: w / 2, y: 22, class: "name" }, cut(each.id, 24)),
      s("text", { x: w / 2, y: 39, class: "note" }, cut(note.text ?? "", 28)),
      note.busy === undefined ? null : s("rect", { x: 16, y: 48, width: w - 32, height: 5, rx: 2.500, class: "gauge" }),
      busy > 0 ? s("rect", { x: 16, y: 48, width: Math.max((w - 32) * busy, 2), height: 5, rx: 2.500, class: busy > 0.8 ? "busy hot" : "busy" }) : null));
  }
  const first = graph.node(shape.components.find((each) => each.kind === "spout")?.id);
  const holder = h("div", { class: "scroll canvas", tabindex: "0", role: "region", "aria-label": "Graph" }, svg);
  return { holder, begin: first ? [(first.x * scale) - room / 2, (first.y * scale) - 280] : [0, 0] };
}

/** How busy each task of a component was, beside what is said of it otherwise. */
export function notesOf(shape, edges, said) {
  const notes = {};
  for (const each of shape.components) {
    const text = said[each.id] || `${each.kind}${each.parallelism ? ` × ${each.parallelism}` : ""}`;
    const busy = edges?.busy_ms?.[each.id];
    if (!busy || !(edges.seconds > 0)) {
      notes[each.id] = { text };
      continue;
    }
    const share = busy[1] / edges.seconds / 1000 / (each.parallelism || 1);
    const last = busy[0] === null ? "" : `${duration(busy[0] / 1000)} in the last transaction, ${duration(busy[1] / 1000)} in the last ${count(edges.transactions)}; `;
    notes[each.id] = { text: `${text}, busy ${percent(share)}`, busy: share, why: `${last}each of its tasks was busy with it for ${percent(share)} of the time` };
  }
  return notes;
}

export function percent(share) {
  return share > 0 && share < 0.01 ? "< 1 %" : `${Math.round(share * 100)} %`;
}

export function flowsOf(shape, edges) {
  const flows = {};
  for (const edge of shape.edges) {
    const rows = edges?.rows?.[edgeLabel(edge)];
    if (!rows) continue;
    const rate = edges.seconds > 0 ? rows[1] / edges.seconds : null;
    flows[edgeLabel(edge)] = {
      last: rows[0], sum: rows[1], rate,
      text: rate === null ? compact(rows[1]) : `${compact(rate)}/s`,
      idle: rows[1] === 0,
      why: rows[0] === null ? `${count(rows[1])} rows in ${duration(edges.seconds)}`
        : `${count(rows[0])} rows in the last transaction, ${count(rows[1])} in the last ${count(edges.transactions)}`,
    };
  }
  return flows;
}

/** Rows that came to a component, and for how long its tasks were busy with each of them. `read`:
    the rows that a spout has read. */
export function workOf(shape, edges, read) {
  const seconds = edges?.seconds || null;
  return shape.components.map((each) => {
    const [into, out] = [shape.edges.filter((edge) => edge.target === each.id), shape.edges.filter((edge) => edge.source === each.id)]
      .map((found) => (found.length ? found.reduce((sum, edge) => sum + (edges?.rows?.[edgeLabel(edge)]?.[1] ?? 0), 0) : null));
    const rows = into ?? read;
    const busy = edges?.busy_ms?.[each.id] ?? null;
    return {
      id: each.id, kind: each.kind, tasks: each.parallelism ?? null,
      rate: rows === null || !seconds ? null : rows / seconds,
      out: out === null || !seconds ? null : out / seconds,
      busy: busy && seconds ? busy[1] / seconds / 1000 / (each.parallelism || 1) : null,
      perRow: busy && rows ? busy[1] / 1000 / rows : null,
      last: busy && busy[0] !== null ? busy[0] / 1000 : null,
    };
  });
}
