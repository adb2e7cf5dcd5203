// The two pages: all topologies, and one. Both draw what the events of the server bring.

import { Histogram, Strip, TimeLine, Trend, spark } from "./charts.js";
import { SIGNS, ago, badge, changed, clock, compact, count, day, duration, fine, h, moment, plural, say, when } from "./dom.js";
import { draw, edgeLabel, flowsOf, notesOf, percent, workOf } from "./graph.js";
import { Table, command, table } from "./tables.js";
import { explain as explainOnHover, roving } from "./tips.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const topologyId = location.pathname === "/topology" ? new URLSearchParams(location.search).get("id") : null;
const RETRY_MS = 3000;

// --- what comes from the server ---

/** Calls `handlers[name]` with each document. Connects again, for as long as the page is open. */
function listen(url, handlers, lost) {
  const source = new EventSource(url);
  let trouble = null;
  const show = () => {
    const stale = trouble?.reason;
    say(connection, stale ? `not current${trouble.age_s ? `, ${duration(trouble.age_s)} old` : ""}` : "live");
    connection.className = `connection ${stale ? "stale" : "live"}`;
    connection.title = stale ? trouble.reason : "New figures come as they are known";
    lost(stale ? trouble.reason : null);
  };
  source.addEventListener("open", () => { trouble = null; show(); });
  source.addEventListener("trouble", (event) => { trouble = JSON.parse(event.data); show(); });
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  source.addEventListener("error", () => {
    connection.className = "connection lost";
    say(connection, "not connected");
    lost(null, true);
    if (source.readyState === EventSource.CLOSED) {
      source.close();
      setTimeout(() => again(url, handlers, lost), RETRY_MS);
    }
  });
}

/** An event source does not say why it was refused: ask until it would be served. */
async function again(url, handlers, lost) {
  let reason = null;
  try {
    const answer = await fetch(url.replace("/events", ""));
    if (answer.status === 401) location.assign("/enter");
    if (answer.ok) return listen(url, handlers, lost);
    reason = answer.status === 404 ? "There is no such topology here." : (await answer.text()).slice(0, 300);
  } catch { /* nothing listens there */ }
  lost(reason, true);
  return setTimeout(() => again(url, handlers, lost), RETRY_MS);
}

// --- all topologies ---

const LIST = [
  { name: "state" }, { name: "topology" }, { name: "kind" },
  { name: "leader", why: "Host and process that lead it, and how many stand by" },
  { name: "txid", number: true, why: "Last committed transaction; of a core topology the last checkpoint" },
  { name: "lag (records)", number: true, why: "Records in the source that are not committed yet, and how that has changed since this page was opened" },
  { name: "rows/s", number: true, why: "Source rows committed per second since its driver started" },
  { name: "committed", number: true, why: "Since the last commit, by the clock of the driver" },
  { name: "failed in 1 h", number: true, why: "Attempts that failed in the last hour" }, { name: "trouble", wide: true },
];
const ORDER = ["unreadable", "failed", "waiting", "starting", "running", "standby", "led", "stopped", "finished"];
const ILL = ["unreadable", "failed", "waiting"];
const FILTER_FROM = 8;
const SPARKS_MAX = 150;

/** The page of all topologies: those that need a look come first. */
class ListPage {
  constructor() {
    this.all = [];
    this.lags = new Map();
    this.note = h("p", { class: "verdict", role: "status" });
    this.filter = h("input", { type: "search", placeholder: "Filter by name, state or host", "aria-label": "Filter topologies", oninput: () => this.draw() });
    this.filter.hidden = true;
    this.table = new Table(LIST, "Topologies");
    this.table.element.classList.add("cards");
    this.empty = h("p", { class: "quiet" });
    main.classList.add("broad");
    main.replaceChildren(h("div", { class: "title" }, h("h1", {}, "Topologies"), this.filter), this.note, this.table.element, this.empty);
  }

  start() {
    setInterval(() => this.ages(), 1000);
    listen("/api/topologies/events", { topologies: (told) => this.told(told) }, (reason, gone) => main.classList.toggle("stale", Boolean(reason || gone)));
  }

  told({ topologies, title, at }) {
    clock.set(at);
    this.all = [...topologies].sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.topology.localeCompare(b.topology, "en", { numeric: true }));
    say(document.getElementById("where"), title);
    const ill = this.all.filter((each) => ILL.includes(each.state));
    const stopped = this.all.filter((each) => ["stopped", "finished"].includes(each.state));
    document.title = `${ill.length ? `(${ill.length}) ` : ""}${title}: Ratchet`;
    say(this.note, !this.all.length ? "No topology has run here."
      : [ill.length ? `${plural(ill.length, "topology needs", "topologies need")} a look: ${ill.slice(0, 5).map((each) => each.topology).join(", ")}${ill.length > 5 ? " and more" : ""}.`
        : `${plural(this.all.length - stopped.length, "topology", "topologies")} at work, none in trouble.`,
      stopped.length ? ` ${count(stopped.length)} stopped.` : ""].join(""));
    this.note.className = `verdict ${ill.length ? "bad" : "good"}`;
    this.filter.hidden = this.all.length < FILTER_FROM;
    this.trends(at);
    this.draw();
  }

  trends(at) {
    for (const name of this.lags.keys()) if (!this.all.some((each) => each.topology === name)) this.lags.delete(name);
    for (const each of this.all) {
      const lag = each.status?.lag;
      if (lag === null || lag === undefined) continue;
      this.lags.set(each.topology, [...(this.lags.get(each.topology) ?? []), [at, lag]].slice(-SPARKS_MAX));
    }
  }

  draw() {
    const wanted = this.filter.hidden ? "" : this.filter.value.trim().toLowerCase();
    const said = (each) => [each.topology, each.state, each.kind, ...each.drivers.map((driver) => driver.host)].join(" ").toLowerCase();
    const found = this.all.filter((each) => said(each).includes(wanted));
    this.table.element.hidden = !found.length;
    say(this.empty, this.all.length && !found.length ? "No topology is called so." : this.all.length ? "" : "Start one with ratchet run MODULE:TOPOLOGY under this root, and it shows here.");
    this.table.update(found.map((each) => [each.topology, this.cells(each)]));
    this.ages();
  }

  cells(each) {
    const status = each.status ?? {};
    const leader = each.drivers.find((driver) => driver.phase !== "standby");
    const standbys = each.drivers.length - (leader ? 1 : 0);
    const lags = this.lags.get(each.topology) ?? [];
    const lag = each.status && each.kind === "transactional" ? h("span", { class: "lag" },
      lags.length > 2 ? spark(lags, `Lag since this page was opened, from ${count(lags[0][1])} to ${count(lags.at(-1)[1])} records`) : null, compact(status.lag)) : "";
    return [
      badge(each.state),
      h("a", { href: `/topology?id=${encodeURIComponent(each.topology)}` }, each.topology), each.kind,
      (leader ? `${leader.host}:${leader.pid}` : "none") + (standbys ? ` + ${plural(standbys, "standby", "standbys")}` : ""),
      each.txid === null ? "none" : count(each.txid), lag,
      status.rows_per_second === undefined ? "" : fine(status.rows_per_second),
      each.kind === "core" ? "" : h("span", { "data-at": each.committed_at ?? "" }, this.age(each.committed_at)),
      status.failures_last_hour === undefined ? "" : count(status.failures_last_hour),
      each.trouble ? `${each.state === "running" ? "last error: " : ""}${each.trouble}` : "",
    ];
  }

  age(at) { return at ? ago(clock.since(Number(at))) : "never"; }

  ages() {
    for (const each of this.table.body.querySelectorAll("[data-at]")) say(each, this.age(each.dataset.at));
  }
}

// --- one topology ---

class Figures {
  constructor() {
    this.element = h("dl", { class: "figures" });
    this.values = new Map();
    this.rove = roving(this.element);
  }

  /** `figures`: name, value, unit or remark, what it means, whether it is alarming. */
  update(figures) {
    const names = figures.map(([name]) => name);
    for (const [name, { box }] of this.values) if (!names.includes(name)) { box.remove(); this.values.delete(name); }
    for (const [name, value, remark, why, alarming] of figures) {
      let known = this.values.get(name);
      if (!known) {
        const [dd, small] = [h("dd", {}), h("dd", { class: "remark" })];
        const box = h("div", { "data-why": why }, h("dt", {}, name), dd, small, h("dd", { class: "why" }, why));
        this.values.set(name, (known = { box, dd, small }));
        this.element.append(box);
        this.rove();
      }
      say(known.dd, value);
      say(known.small, remark);
      known.box.classList.toggle("alarming", Boolean(alarming));
    }
  }
}

function section(id, question, why, ...children) {
  return h("section", { id, "aria-labelledby": `${id}-question` }, h("h2", { id: `${id}-question` }, question), h("p", { class: "why" }, why), ...children);
}

/** A picture with a heading. */
function pictured(title, ...children) {
  return h("div", { class: "pictured" }, h("h3", {}, title), ...children);
}

const COUNTS = [["emitted", "Tuples that it emitted"], ["executed", "Tuples that it executed"], ["acked", "Tuples that it acked"], ["failed", "Tuples that it failed, or was told have failed"],
  ["completed", "Of a spout: tuples whose tree is complete"], ["timed_out", "Of a spout: tuples that took too long"], ["pending", "Of a spout: tuples whose fate is open"], ["waiting", "Of a bolt: tuples that have come and wait"], ["late", "Of a windowed bolt: tuples that came too late"], ["died", "Instances that an error ended"]];
const TABLES = {
  worst: ["Partitions that lag most", [{ name: "partition" }, { name: "lag", number: true, why: "Records that are not committed yet" },
    { name: "committed up to", number: true, why: "The next offset to commit" }, { name: "in flight", number: true, why: "Offsets planned and not committed" },
    { name: "lost", number: true, why: "Offsets that were gone before they were read" }]],
  work: ["Components", [{ name: "component" }, { name: "kind" }, { name: "tasks", number: true, why: "How many work side by side" },
    { name: "rows in/s", number: true, why: "Rows that came to it, of a spout those that it read" }, { name: "rows out/s", number: true, why: "Rows that others got from it; a row for two of them counts twice" },
    { name: "busy", number: true, why: "How much of the time each of its tasks was busy with it. The one that is most busy is the bottleneck; a spout that waits for its source counts as busy" },
    { name: "time per row", number: true, why: "For how long a task was busy with each row" }, { name: "last transaction", number: true, why: "For how long its tasks together were busy with the last transaction" }]],
  streams: ["Streams", [{ name: "stream", wide: true }, { name: "grouping", why: "Which task gets which row" }, { name: "rows/s", number: true, why: "Over the last hundred transactions, of a core topology over half a minute" },
    { name: "rows lately", number: true, why: "All of them in that time" }, { name: "rows, last transaction", number: true }]],
  counts: ["Components, in tuples", [{ name: "component" }, ...COUNTS.map(([name, why]) => ({ name: name.replace("_", " "), number: true, why })),
    { name: "latency", number: true, why: "Mean time until a tree is complete" }]],
  states: ["States", [{ name: "component" }, { name: "keys", number: true, why: "Keys in the state, of all its tasks" }, { name: "changed keys", number: true, why: "Keys that the last checkpoint has changed" },
    { name: "written", number: true, why: "Bytes of the keys and values that the last checkpoint has changed" }]],
  attempts: ["Failed attempts", [{ name: "when" }, { name: "transaction", number: true }, { name: "attempt", number: true, why: "Those that failed for one reason, one after another, are one line" }, { name: "outcome" }, { name: "reason", wide: true }]],
  errors: ["Errors", [{ name: "when" }, { name: "component" }, { name: "what it did" }, { name: "reason", wide: true }]],
  headers: ["Headers of the sinks", [{ name: "sink", wide: true }, { name: "holds up to", number: true, why: "The last finished transaction, in the sink's own header" },
    { name: "opened", number: true, why: "The transaction whose commit was opened last" }, { name: "epoch", number: true, why: "Only writers of this leadership may write" }]],
  drivers: ["Drivers", [{ name: "role" }, { name: "host" }, { name: "process" }, { name: "since" }, { name: "page" }]],
};
const RECENT_S = 900;
const REORDER_MS = 15000;

class TopologyPage {
  constructor(id) {
    this.id = id;
    this.rows = [];
    this.parts = {};
    this.gone = false;
    this.state = h("span", {});
    this.verdict = h("p", { class: "verdict", role: "status" });
    this.figures = new Figures();
    this.flight = h("div", {});
    this.lag = new Trend("Lag in records, since this page was opened", "records");
    this.rates = new Trend("Rows committed per second", "rows/s");
    this.strip = new Strip();
    this.line = new TimeLine((txid) => this.open(txid));
    this.histogram = new Histogram("How long transactions take", "How long the last transactions took", "transaction");
    this.ages = new Histogram("How old records are when they are committed", "Age of the oldest record of each of the last transactions, when it was committed", "transaction");
    this.graph = h("div", {});
    this.right = h("div", {});
    this.none = h("p", { class: "quiet" });
    this.commands = h("ul", { class: "commands" });
    this.configuration = h("div", {});
    this.detail = h("dialog", { "aria-label": "Transaction" });
    this.tables = Object.fromEntries(Object.entries(TABLES).map(([name, [label, heads]]) => [name, new Table(heads, label)]));
    const { worst, work, streams, counts, states, attempts, errors, headers, drivers } = Object.fromEntries(Object.entries(this.tables).map(([name, each]) => [name, each.element]));
    this.changed = Object.fromEntries(["graph", "work", "right", "commands", "configuration", "flight", "state"].map((name) => [name, changed()]));
    this.worst = h("summary", {});
    this.partitions = h("div", {}, this.strip.element, h("details", {}, this.worst, worst));
    this.tuples = pictured("Components, in tuples", counts);
    this.stateSizes = pictured("States, as of the last checkpoint", states);
    this.noTimes = h("p", { class: "quiet" }, "No transaction is committed yet.");
    this.times = h("div", {}, this.line.element, h("div", { class: "pair" }, this.histogram.element, this.ages.element));
    this.noHeaders = h("p", { class: "quiet" }, "The driver knows the headers of its sinks while it leads; its own page shows them.");
    this.nobody = h("p", { class: "quiet" }, "No driver lives.");
    this.sections = {
      behind: section("behind", "Is it behind?", "Lag is the number of records in the source that are not committed yet. Its trend begins when this page is opened; the rate is that of the transactions that are kept, of the last quarter of an hour at most.",
        h("div", { class: "pair" }, this.lag.element, this.rates.element), this.partitions),
      slow: section("slow", "What is slow?", "A transaction is processed, waits until those before it are committed, and is committed. Much waiting means that commits are the bottleneck; much processing, that reading and bolts are. The age of a record is the time from its own timestamp until it is committed; of each transaction the oldest one counts.",
        this.noTimes, this.times),
      graph: section("graph", "Where do the rows go?", "Spouts read, bolts transform, committers write. Beside each arrow: rows per second, over the last hundred transactions, of a core topology over half a minute. The bar in a component shows how much of the time each of its tasks was busy with it; what a spout waits for its source counts, too.",
        this.graph, pictured("Time of each component", work), h("details", {}, h("summary", {}, "Streams, in rows"), streams), this.tuples, this.stateSizes),
      failed: section("failed", "What failed, and why?", "Attempts that came to nothing. Their transactions were processed again, so nothing is lost or doubled.", this.none, attempts, errors),
      right: section("right", "Is it right?", "What each sink holds, and what was not counted.", this.noHeaders, headers, this.right),
      type: section("type", "What do I type now?", "Commands to begin with, in an environment where Ratchet is installed. Give them --config as you give it to run.", this.commands),
      runs: section("runs", "Who runs it, and how?", "Drivers are known while their sessions with ZooKeeper live. Secrets are hidden, and all texts of app.*.", this.nobody, drivers, this.configuration),
    };
    this.jumps = h("nav", { class: "jumps", "aria-label": "Questions" }, Object.values(this.sections).map((each) => h("a", { href: `#${each.id}` }, each.querySelector("h2").textContent)));
    main.replaceChildren(h("div", { class: "title" }, h("h1", {}, id), this.state), this.verdict, this.figures.element, this.flight,
      this.jumps, ...Object.values(this.sections), this.detail);
    for (const each of Object.values(this.sections)) each.hidden = true;
    this.jumps.hidden = true;
    document.title = `${id}: Ratchet`;
    document.getElementById("where").replaceChildren(h("span", { "aria-hidden": "true" }, " / "), id);
    let room = 0;
    new ResizeObserver(([{ contentRect }]) => {
      if (Math.abs(contentRect.width - room) < 8) return;
      room = contentRect.width;
      this.soon();
    }).observe(main);
  }

  start() {
    const handlers = {};
    for (const name of ["about", "live", "partitions", "failures", "headers"]) {
      handlers[name] = (document) => { this.parts[name] = document; this.soon(); };
    }
    handlers.transactions = ({ anew, columns, rows }) => {
      const read = rows.map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]])));
      this.rows = (anew ? read : [...this.rows, ...read]).slice(-1000);
      this.newRows = true;
      this.soon();
    };
    listen(`/api/topology/events?id=${encodeURIComponent(this.id)}`, handlers, (reason, gone) => {
      this.gone = Boolean(gone);
      this.stale = reason;
      main.classList.toggle("stale", Boolean(reason || gone));
      this.judge();
    });
    setInterval(() => this.tick(), 1000);
  }

  /** Draws once for the events that come together, and not while nobody sees it. */
  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const { live } = this.parts;
    if (!live) return;
    clock.set(live.at);
    const transactional = live.kind === "transactional";
    this.changed.state(live.state, () => {
      this.state.replaceChildren(badge(live.state));
      document.title = `${SIGNS[live.state] ?? "?"} ${this.id}: Ratchet`;
    });
    this.lag.add(live.at, live.status?.lag);
    this.tick();
    if (this.newRows) {
      this.newRows = false;
      this.line.update(this.rows);
      this.histogram.update(this.rows.map(({ processing_ms, waiting_ms, commit_ms }) => (processing_ms ?? 0) + (waiting_ms ?? 0) + (commit_ms ?? 0)));
      const ages = this.rows.map((row) => row.oldest_age_ms).filter((each) => each !== null && each !== undefined);
      this.ages.element.hidden = !ages.length;
      this.ages.update(ages);
    }
    this.rates.update(rates(this.rows, live.at));
    this.lag.element.hidden = !this.lag.points.length;
    this.rates.element.hidden = !this.rates.points.length;
    this.partitions.hidden = !this.parts.partitions?.total;
    this.sections.behind.hidden = !transactional || (this.lag.element.hidden && this.partitions.hidden && !this.rates.points.length);
    this.sections.slow.hidden = !transactional;
    this.times.hidden = !this.rows.length;
    this.noTimes.hidden = Boolean(this.rows.length);
    this.drawFlight(live);
    if (!this.partitions.hidden) this.drawPartitions(this.parts.partitions);
    this.drawGraph(live);
    this.drawFailures(transactional);
    this.drawRight(transactional);
    this.drawCommands(live);
    this.drawDrivers(live);
    this.jumps.hidden = false;
    [...this.jumps.children].forEach((jump, index) => { jump.hidden = Object.values(this.sections)[index].hidden; });
  }

  tick() {
    const { live } = this.parts;
    if (!live) return;
    this.figures.update(live.kind === "transactional" ? this.transactional(live) : this.core(live));
    this.judge();
  }

  transactional(live) {
    const status = live.status;
    const since = clock.since(live.committed_at);
    const last = ["Last commit", since === null ? "none" : ago(since), live.committed_at ? `at ${when(live.committed_at)}` : "nothing is committed yet",
      "Time since the last transaction was committed. It grows when nothing comes in, too."];
    const upTo = ["Committed up to", live.txid === null ? "nothing" : count(live.txid), "transaction", "The last transaction that every sink holds. They are numbered 1, 2, 3 and so on."];
    if (!status) return [last, upTo];
    return [
      ["Lag", compact(status.lag), "records", "Records in the source that are not committed yet.", status.lag > 0 && this.lag.slope() > 0],
      ["Rate", fine(status.rows_per_second), "rows/s", "Source rows committed per second, over the last minute."],
      last,
      ["In flight", count((live.in_flight ?? []).length), status.in_flight_rows ? `transactions, ${compact(status.in_flight_rows)} rows` : "transactions", "Transactions that are planned and not committed yet."],
      ["Failed attempts", count(status.failures_last_hour ?? status.attempts_failed), status.failures_last_hour === undefined ? "since the start" : `in an hour, ${count(status.attempts_failed)} in all`,
        "Attempts that failed and were repeated: in the last hour, and since the driver started. Nothing is lost or doubled by them, but they cost time.", status.failures_last_hour > 0],
      upTo,
      ...(Object.keys(status.pace ?? {}).length === 0 ? [] : [["Pace", status.planned_in_s ? duration(status.planned_in_s) : "open", Object.entries(status.pace).map(([key, value]) => `${key.replace(/^topology\.(commit\.)?/, "")} ${fine(value)}`).join(", "), "When the next transaction may be planned, and the limits that hold now: the configuration, and what ratchet set has changed."]]),
      ["Rows", compact(status.committed_rows), "since the start", "Source rows that this driver has committed."],
      ["Bad records", count(status.bad_records), "records", "Committed records that could not be decoded: skipped, counted, or sent to dead letters.", status.bad_records > 0],
      ["Lost records", count(status.lost_records), "records", "Records that the source had removed before they were read, and that were skipped because on_data_loss says so.", status.lost_records > 0],
      ["Epoch", count(status.epoch), "of the leadership", "Grows with every election. Writers of an older epoch are refused by every sink."],
    ];
  }

  core(live) {
    const { status } = live;
    if (!status) return live.txid === null ? [] : [["Checkpoint", count(live.txid), "committed", "The last committed checkpoint of the states."]];
    const sum = (name) => Object.values(status.components).reduce((all, each) => all + each[name], 0);
    const failed = Object.values(status.components).reduce((all, each) => all + (each.executed ? 0 : each.failed), 0);
    const [completed, latency] = [sum("completed"), sum("latency_s")];
    const [was, at] = [this.before?.completed, this.before?.at];
    if (live.at !== at) {
      this.rate = was === undefined ? null : Math.max((completed - was) / (live.at - at), 0);
      this.before = { completed, at: live.at };
    }
    const figures = [
      ["Pending", compact(status.pending), "tuples", "Spout tuples whose tree is not complete yet."],
      ["Completed", compact(completed), this.rate === null || this.rate === undefined ? "tuples" : `${compact(this.rate)} tuples/s`, "Spout tuples that were fully processed."],
      ["Complete latency", completed ? duration(latency / completed) : "unknown", "mean since the start", "From the emission of a spout tuple until its tree is complete."],
      ["Failed", compact(failed), `${compact(sum("timed_out"))} timed out`, "Spout tuples that a bolt failed, or that took too long. The spout was told of each.", failed > 0],
      ["Trees", compact(status.trees), "tracked", "Tuple trees that the ackers track."],
      ["Died", count(sum("died")), "instances", "Instances of components that an error of theirs ended. A new one took the place of each.", sum("died") > 0],
      ["Rounds", compact(status.rounds), `${count(status.rounds_lost)} lost`, "Rounds since the start; of a lost one nothing came back.", status.rounds_lost > 0],
    ];
    if (status.checkpoint) {
      figures.push(["Checkpoint", count(status.checkpoint.txid), `${status.checkpoint.phase.toLowerCase()}, ${status.checkpoint.guarantee}`, "The last committed checkpoint of the states, and their guarantee."],
        ["Recoveries", count(status.checkpoint.recoveries), "of the states", "How often all states went back to the last checkpoint.", status.checkpoint.recoveries > 0]);
    }
    return figures;
  }

  /** What somebody on call wants to know first, in one sentence. */
  judge() {
    const { live } = this.parts;
    const [text, kind] = this.sentence(live);
    say(this.verdict, text);
    this.verdict.className = `verdict ${kind}`;
  }

  sentence(live) {
    if (this.gone) {
      return [this.stale ?? (live ? "Nothing answers: the driver may have ended. What is below is what it said last." : "Nothing answers yet."), "bad"];
    }
    if (!live) return ["Asking for the first figures.", ""];
    if (this.stale) return [`Not current: ${this.stale}.`, "bad"];
    const { status, trouble } = live;
    switch (live.state) {
      case "unreadable": return [`Its documents cannot be read: ${trouble}`, "bad"];
      case "failed": return [`It has failed: ${trouble ?? "its log says why"}`, "bad"];
      case "waiting": return [status?.repeating ? `It fails and is repeated: ${status.repeating}` : `It waits: ${trouble}`, "bad"];
      case "starting": return ["It starts.", ""];
      case "standby": return ["Another driver leads. This one takes over when that is gone.", ""];
      case "finished": return ["Its source has an end, and everything up to it is committed.", ""];
      case "stopped": return ["Nobody runs it. Nothing is lost: the next run goes on where this one stopped.", ""];
      case "led": return ["Somebody holds its leadership, and is no driver: a command such as reset.", ""];
    }
    if (live.kind !== "transactional") {
      return [status?.last_error ? `It runs. Last error: ${status.last_error}` : "It runs.", status?.last_error ? "warn" : "good"];
    }
    if (status?.lag === 0) return ["It runs, and has committed all that the source holds.", "good"];
    if (!status?.lag) return ["It runs.", "good"];
    const slope = this.lag.slope();
    if (slope === null) return [`It runs, ${plural(status.lag, "record")} behind.`, "good"];
    if (slope > status.lag * 0.002) return [`It runs and falls behind: ${compact(status.lag)} records, ${compact(slope)} more each second.`, "warn"];
    if (slope < 0) return [`It runs, ${plural(status.lag, "record")} behind, and catches up in about ${duration(status.lag / -slope)}.`, "good"];
    return [`It runs, and keeps up: about ${plural(status.lag, "record")} are on their way.`, "good"];
  }

  drawFlight(live) {
    const flight = live.in_flight ?? [];
    this.changed.flight(flight, () => this.flight.replaceChildren(...(flight.length ? [h("ul", { class: "flight", "aria-label": "Transactions in flight" },
      flight.slice(0, 30).map((each) => h("li", { "data-why": "A transaction in flight, its phase, and the time in this phase" },
        h("b", {}, count(each.txid)), ` ${each.phase}`, each.attempt > 1 ? `, attempt ${each.attempt}` : "", each.since_s === null ? "" : `, ${duration(each.since_s)}`)),
      flight.length > 30 ? h("li", {}, `and ${count(flight.length - 30)} more`) : null)] : [])));
  }

  drawPartitions(partitions) {
    this.strip.update(partitions.all);
    say(this.worst, `The ${count(partitions.worst.length)} that lag most, of ${count(partitions.total)}`);
    this.tables.worst.update(partitions.worst.map(([name, ...rest]) => [name, [name, ...rest.map(count)]]));
  }

  drawGraph(live) {
    const shape = this.parts.about?.graph;
    const core = live.kind === "core" ? live.status?.components ?? {} : null;
    const drawn = Boolean(shape?.components?.length);
    this.sections.graph.hidden = !drawn && !core;
    if (drawn) {
      const said = {};
      for (const [name, each] of Object.entries(core ?? {})) {
        said[name] = each.executed ? `${compact(each.executed)} executed` : each.emitted ? `${compact(each.emitted)} emitted` : "";
      }
      const notes = notesOf(shape, live.edges, said);
      const flows = flowsOf(shape, live.edges);
      this.changed.graph([shape, notes, flows, this.graph.clientWidth], () => {
        const old = this.graph.firstChild;
        const [left, top, focused] = [old?.scrollLeft, old?.scrollTop, old && old === document.activeElement];
        const { holder, begin } = draw(shape, notes, flows, this.graph.clientWidth || 1000);
        this.graph.replaceChildren(holder);
        holder.scrollTo(...(old ? [left, top] : begin));
        if (focused) holder.focus({ preventScroll: true });
      });
      this.drawWork(shape, live, flows, core);
    }
    this.tuples.hidden = !core;
    if (core) {
      this.tables.counts.update(Object.entries(core).map(([name, each]) => [name, [name, ...COUNTS.map(([column]) => compact(each[column])), each.completed ? duration(each.latency_s / each.completed) : ""]]));
    }
    const states = Object.entries(live.status?.checkpoint?.states ?? {});
    this.stateSizes.hidden = !states.length;
    this.tables.states.update(states.map(([name, each]) => [name, [name, count(each.keys), count(each.changed), `${compact(each.changed_bytes)} B`]]));
  }

  drawWork(shape, live, flows, core) {
    this.changed.work([shape, live.edges, core], () => {
      const read = core ? null : this.rows.slice(-(live.edges?.transactions ?? 0)).reduce((sum, row) => sum + row.rows, 0);
      const work = this.ordered(workOf(shape, live.edges, read));
      const rate = (value) => (value === null ? "" : compact(value));
      this.tables.work.update(work.map((each) => [each.id, [each.id, each.kind, each.tasks === null ? "" : count(each.tasks), rate(each.rate), rate(each.out),
        each.busy === null ? "" : percent(each.busy), each.perRow === null ? "" : duration(each.perRow), each.last === null ? "" : duration(each.last)]]));
      this.tables.streams.update(shape.edges.map((edge) => {
        const flow = flows[edgeLabel(edge)] ?? {};
        return [`${edgeLabel(edge)} ${edge.grouping}`, [edgeLabel(edge), edge.grouping ?? "", rate(flow.rate ?? null), flow.sum === undefined ? "" : count(flow.sum), flow.last === undefined || flow.last === null ? "" : count(flow.last)]];
      }));
    });
  }

  /** The busiest first. The order stays for a while: rows that jump cannot be read. */
  ordered(work) {
    if (!this.order || Date.now() - this.order.at > REORDER_MS) {
      const busiest = [...work].sort((a, b) => (b.busy ?? -1) - (a.busy ?? -1));
      this.order = { at: Date.now(), places: new Map(busiest.map((each, index) => [each.id, index])) };
    }
    const place = (each) => this.order.places.get(each.id) ?? work.length;
    return work.sort((a, b) => place(a) - place(b));
  }

  drawFailures(transactional) {
    const failures = this.parts.failures ?? [];
    this.sections.failed.hidden = !this.parts.failures;
    const { attempts, errors } = this.tables;
    attempts.element.hidden = !transactional || !failures.length;
    errors.element.hidden = transactional || !failures.length;
    say(this.none, failures.length ? "" : transactional ? "No attempt failed among the transactions that are recorded." : "No component has reported an error.");
    if (transactional) {
      attempts.update(failures.map((each) => [`${each.txid} ${each.attempt - each.attempts}`, [when(each.at),
        h("button", { type: "button", class: "link", "aria-label": `Open transaction ${count(each.txid)}`, onclick: () => this.open(each.txid) }, count(each.txid)),
        each.attempts > 1 ? `${count(each.attempt - each.attempts + 1)} to ${count(each.attempt)}` : count(each.attempt), each.outcome, each.reason]]));
    } else {
      errors.update(failures.map((each, index) => [`${each.at} ${each.component} ${each.task} ${failures.length - index}`, [when(each.at), `${each.component}[${each.task}]`, each.outcome,
        each.trace ? h("details", {}, h("summary", {}, each.reason), h("pre", { tabindex: "0" }, each.trace)) : each.reason]]));
    }
  }

  drawRight(transactional) {
    const { headers = [], live, about } = this.parts;
    this.sections.right.hidden = !transactional;
    if (!transactional) return;
    const hidden = (about?.graph?.edges ?? []).filter((edge) => edge.target.endsWith("-dead-letters"));
    const letters = hidden.map((edge) => live.edges?.rows?.[edgeLabel(edge)]?.[1] ?? 0).reduce((all, each) => all + each, 0);
    const bad = live.status?.bad_records ?? null;
    this.tables.headers.element.hidden = !headers.length;
    this.noHeaders.hidden = Boolean(headers.length);
    this.tables.headers.update(headers.map((each) => [each.location, [each.location, count(each.done), each.open === null ? "none" : count(each.open), count(each.epoch)]]));
    this.changed.right([letters, hidden.length, bad, live.status?.lost_records], () => this.right.replaceChildren(h("ul", { class: "plain" },
      bad ? h("li", {}, `${plural(bad, "record")} could not be decoded, and ${bad === 1 ? "is" : "are"} in no figure.`) : null,
      live.status?.lost_records ? h("li", {}, `${plural(live.status.lost_records, "record")} were gone before they were read, and are in no figure.`) : null,
      hidden.length ? h("li", {}, `${plural(letters, "dead letter")} in the last hundred transactions; ${hidden.map((edge) => edge.target).join(", ")} ${hidden.length === 1 ? "keeps" : "keep"} them.`) : null,
      h("li", {}, "To prove the figures: ", h("code", {}, "ratchet verify MODULE:TOPOLOGY"), " recomputes every sink from the source, and names what differs."))));
  }

  drawCommands(live) {
    this.sections.type.hidden = false;
    const name = /^[A-Za-z0-9][\w.-]*$/.test(this.id) ? this.id : "ID";
    const transactional = live.kind === "transactional";
    const ill = ["waiting", "failed"].includes(live.state);
    const failed = (this.parts.failures ?? [])[0]?.txid;
    const all = [
      live.state === "stopped" && ["ratchet run MODULE:TOPOLOGY", "runs it again, from where it stopped"],
      transactional && ill && ["ratchet find-poison MODULE:TOPOLOGY", "narrows a batch down to the records that make it fail"],
      ["ratchet check MODULE:TOPOLOGY", "is every server there, and may we use it?"],
      [`ratchet status ${name} --watch`, "the same figures in a terminal"],
      transactional && failed !== undefined && [`ratchet history ${name} --txid ${failed}`, "all of the transaction that failed last: offsets, attempts, rows"],
      transactional && [`ratchet history ${name} --failed`, "transactions that took more than one attempt, with reasons"],
      transactional && ["ratchet verify MODULE:TOPOLOGY", "recomputes the sinks from the source, and names what differs"],
      transactional && ["ratchet explain MODULE:TOPOLOGY STATE KEY", "why a number in a sink is what it is"],
    ].filter(Boolean);
    this.changed.commands(all, () => this.commands.replaceChildren(...all.map(([text, what]) => h("li", {}, command(text), h("span", {}, what)))));
  }

  drawDrivers(live) {
    this.sections.runs.hidden = false;
    this.nobody.hidden = Boolean(live.drivers.length);
    this.tables.drivers.element.hidden = !live.drivers.length;
    this.tables.drivers.update(live.drivers.map((each) => [`${each.host} ${each.pid} ${each.started_at}`, [each.phase === "standby" ? "standby" : "leader", each.host, String(each.pid), day(each.started_at),
      each.here ? "this page" : each.page ? h("a", { href: each.page, rel: "noreferrer" }, each.page) : "none"]]));
    const configuration = this.parts.about?.configuration;
    if (!configuration) return;
    this.changed.configuration(configuration, () => {
      const rows = (wanted) => configuration.filter(([, , set]) => set === wanted).map(([key, value]) => [h("code", {}, key), value]);
      const heads = [{ name: "key" }, { name: "value", wide: true }];
      this.configuration.replaceChildren(h("details", {}, h("summary", {}, "Configuration"), h("h3", {}, "Set"), table(heads, rows(true), "Configuration that was set"),
        h("h3", {}, "Default"), table(heads, rows(false), "Defaults")));
    });
  }

  async open(txid) {
    const close = h("button", { type: "button", onclick: () => this.detail.close() }, "Close");
    this.detail.replaceChildren(h("h2", {}, `Transaction ${count(txid)}`), h("p", { class: "quiet" }, "Asking."), close);
    if (!this.detail.open) this.detail.showModal();
    try {
      const answer = await fetch(`/api/topology/transaction?id=${encodeURIComponent(this.id)}&txid=${txid}`);
      const found = await answer.json();
      this.detail.replaceChildren(h("h2", {}, `Transaction ${count(txid)}`), ...(answer.ok ? detailsOf(found) : [h("p", {}, "It is not kept any more: only the last thousand are.")]), close);
    } catch (error) {
      this.detail.replaceChildren(h("h2", {}, `Transaction ${count(txid)}`), h("p", {}, `It cannot be read: ${error.message}`), close);
    }
    close.focus();
  }
}

function detailsOf(found) {
  const attempts = found.attempts.map((each) => h("article", {},
    h("h3", {}, `Attempt ${each.attempt_id}: ${each.outcome}`),
    each.reason ? h("p", { class: "reason" }, each.reason) : null,
    h("p", { class: "quiet" }, [day(each.started_at), `epoch ${each.epoch}`,
      ...["processing", "waiting", "commit"].filter((name) => each[`${name}_ms`] !== null).map((name) => `${name} ${duration(each[`${name}_ms`] / 1000)}`),
      `${plural(each.source_rows, "row")} read`, each.bad_records ? `${count(each.bad_records)} bad` : null].filter(Boolean).join(", ")),
    each.trace ? h("pre", { tabindex: "0" }, each.trace) : null,
    Object.keys(each.rows).length ? table([{ name: "stream", wide: true }, { name: "rows", number: true }], Object.entries(each.rows).map(([edge, rows]) => [edge, count(rows)]), "Rows over each stream") : null,
    Object.keys(each.component_ms ?? {}).length ? table([{ name: "component", wide: true }, { name: "busy", number: true, why: "For how long its tasks together were busy with it" }],
      Object.entries(each.component_ms).sort(([, a], [, b]) => b - a).map(([name, busy]) => [name, duration(busy / 1000)]), "Time of each component") : null));
  const names = [...new Set(found.plan.flatMap(([, meta]) => (typeof meta === "object" ? Object.keys(meta) : [])))];
  const plan = found.plan.length ? [h("details", {}, h("summary", {}, `What it read: ${plural(found.partitions, "partition")}`),
    table([{ name: "partition" }, ...names.map((name) => ({ name: name.replaceAll("_", " "), number: true }))],
      found.plan.map(([partition, meta]) => [partition, ...names.map((name) => String(meta[name] ?? ""))]), "Offsets by partition"))] : [];
  return [found.attempts_total > found.attempts.length ? h("p", {}, `${count(found.attempts_total)} attempts; the last ${count(found.attempts.length)} are kept.`) : "", ...attempts, ...plan];
}

/** Rows per second of the last transactions and until `now`, in at most sixty steps of equal length: pairs of their
    ends and the rates. */
function rates(rows, now) {
  const closed = rows.filter((row) => row.closed_at);
  const end = Math.max(closed.at(-1)?.closed_at ?? 0, now);
  const recent = closed.filter((row) => end - row.closed_at <= RECENT_S);
  const begin = recent[0]?.closed_at ?? 0;
  if (!(end - begin > 2)) return [];
  const step = Math.max((end - begin) / 60, 1);
  const sums = Array(Math.max(Math.floor((end - begin) / step), 1)).fill(0);
  for (const row of recent.slice(1)) sums[Math.min(Math.ceil((row.closed_at - begin) / step - 1e-9), sums.length) - 1] += row.rows;
  return sums.map((sum, index) => [begin + (index + 1) * step, sum / step]);
}

// --- both ---

const explain = document.getElementById("explain");
explain.addEventListener("click", () => {
  const on = document.body.classList.toggle("explained");
  explain.setAttribute("aria-pressed", String(on));
});
explainOnHover();

if (topologyId === null) new ListPage().start();
else new TopologyPage(topologyId).start();
