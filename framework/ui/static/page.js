// The two pages: all topologies, and one. Both draw what the events of the server bring.

import { Histogram, Strip, TimeLine, Trend } from "./charts.js";
import { ago, badge, changed, clock, compact, count, day, duration, h, moment, plural, say, table } from "./dom.js";
import { draw, edgeLabel, flowsOf, notesOf } from "./graph.js";

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

function showList() {
  const holder = h("div", {});
  const note = h("p", { class: "verdict", role: "status" });
  main.replaceChildren(h("h1", {}, "Topologies"), note, holder);
  const update = changed();
  let last = [];
  const ages = () => {
    for (const each of holder.querySelectorAll("[data-at]")) {
      say(each, each.dataset.at ? ago(clock.since(Number(each.dataset.at))) : "never");
    }
  };
  const heads = [
    { name: "state" }, { name: "topology" }, { name: "kind" }, { name: "leader", why: "Host and process that lead it; + standbys" },
    { name: "txid", number: true, why: "Last committed transaction; of a core topology the last checkpoint" },
    { name: "lag (records)", number: true, why: "Records in the source that are not committed yet" },
    { name: "rows/s", number: true, why: "Source rows committed per second since its driver started" },
    { name: "committed", number: true, why: "Since the last commit, by the clock of the driver" },
    { name: "failed in 1 h", number: true, why: "Attempts that failed in the last hour" }, { name: "trouble", wide: true },
  ];
  const rowOf = (each) => {
    const status = each.status ?? {};
    const leader = each.drivers.find((driver) => driver.phase !== "standby");
    const standbys = each.drivers.length - (leader ? 1 : 0);
    return [
      badge(each.state),
      h("a", { href: `/topology?id=${encodeURIComponent(each.topology)}` }, each.topology), each.kind,
      (leader ? `${leader.host}:${leader.pid}` : "none") + (standbys ? ` + ${plural(standbys, "standby", "standbys")}` : ""),
      each.txid === null ? "none" : count(each.txid), each.status && each.kind === "transactional" ? compact(status.lag) : "",
      status.rows_per_second === undefined ? "" : compact(status.rows_per_second),
      each.kind === "core" ? "" : h("span", { "data-at": each.committed_at ?? "" }),
      status.failures_last_hour === undefined ? "" : count(status.failures_last_hour),
      each.trouble ? `${each.state === "running" ? "last error: " : ""}${each.trouble}` : "",
    ];
  };
  const ORDER = ["unreadable", "failed", "waiting", "starting", "running", "standby", "led", "stopped"];
  const told = ({ topologies, title, at }) => {
    clock.set(at);
    last = [...topologies].sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.topology.localeCompare(b.topology));
    document.title = `${title}: Ratchet`;
    say(document.getElementById("where"), title);
    const ill = last.filter((each) => ["unreadable", "failed", "waiting"].includes(each.state));
    const stopped = last.filter((each) => each.state === "stopped");
    say(note, !last.length ? "No topology has run here."
      : [ill.length ? `${plural(ill.length, "topology needs", "topologies need")} a look: ${ill.slice(0, 5).map((each) => each.topology).join(", ")}${ill.length > 5 ? " and more" : ""}.`
        : `${plural(last.length - stopped.length, "topology", "topologies")} at work, none in trouble.`,
      stopped.length ? ` ${count(stopped.length)} stopped.` : ""].join(""));
    note.className = `verdict ${ill.length ? "bad" : "good"}`;
    update(last, () => holder.replaceChildren(last.length ? table(heads, last.map(rowOf), { label: "Topologies" }) : ""));
    ages();
  };
  setInterval(ages, 1000);
  listen("/api/topologies/events", { topologies: told }, (reason, gone) => main.classList.toggle("stale", Boolean(reason || gone)));
}

// --- one topology ---

class Figures {
  constructor() {
    this.element = h("dl", { class: "figures" });
    this.values = new Map();
  }

  /** `figures`: name, value, unit or remark, what it means, whether it is alarming. */
  update(figures) {
    const names = figures.map(([name]) => name);
    for (const [name, { box }] of this.values) if (!names.includes(name)) { box.remove(); this.values.delete(name); }
    for (const [name, value, remark, why, alarming] of figures) {
      let known = this.values.get(name);
      if (!known) {
        const [dd, small] = [h("dd", {}), h("dd", { class: "remark" })];
        const box = h("div", { title: why }, h("dt", {}, name), dd, small, h("dd", { class: "why" }, why));
        this.values.set(name, (known = { box, dd, small }));
        this.element.append(box);
      }
      say(known.dd, value);
      say(known.small, remark);
      known.box.classList.toggle("alarming", Boolean(alarming));
    }
  }
}

function section(question, why, ...children) {
  return h("section", {}, h("h2", {}, question), h("p", { class: "why" }, why), ...children);
}

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
    this.lag = new Trend("Lag since this page was opened");
    this.strip = new Strip();
    this.worst = h("div", {});
    this.line = new TimeLine((txid) => this.open(txid));
    this.histogram = new Histogram();
    this.graph = h("div", {});
    this.components = h("div", {});
    this.failures = h("div", {});
    this.right = h("div", {});
    this.commands = h("ul", { class: "commands" });
    this.drivers = h("div", {});
    this.configuration = h("div", {});
    this.detail = h("dialog", { "aria-label": "Transaction" });
    this.changed = Object.fromEntries(["graph", "worst", "failures", "right", "commands", "drivers", "configuration",
      "strip", "flight", "components", "state"].map((name) => [name, changed()]));
    this.sections = {
      behind: section("Is it behind?", "Lag is the number of records in the source that are not committed yet. The trend begins when this page is opened.",
        h("h3", {}, "Lag, in records, since this page was opened"), this.lag.element,
        (this.partitions = h("div", {}, h("h3", {}, "Lag by partition, in records"), this.strip.element, this.worst))),
      slow: section("What is slow?", "A transaction is processed, waits until those before it are committed, and is committed. Much waiting means that commits are the bottleneck; much processing, that reading and bolts are.",
        h("div", { class: "columns" }, h("div", { class: "grow" }, h("h3", {}, "Time of the last transactions"), this.line.element),
          h("div", {}, h("h3", {}, "How long they take"), this.histogram.element))),
      graph: section("Where do the rows go?", "Spouts read, bolts transform, committers write. Beside each arrow: rows per second, over the last hundred transactions, of a core topology over half a minute. Busy: how much of the time the component's tasks spent with it, together; what a spout waits for its source counts, too.", this.graph, this.components),
      failed: section("What failed, and why?", "Attempts that came to nothing. Their transactions were processed again, so nothing is lost or doubled.", this.failures),
      right: section("Is it right?", "What each sink holds, and what was not counted.", this.right),
      type: section("What do I type now?", "Commands to begin with, in an environment where Ratchet is installed. Give them --config as you give it to run.", this.commands),
      runs: section("Who runs it, and how?", "Drivers are known while their sessions with ZooKeeper live. Secrets are hidden, and all texts of app.*.", this.drivers, this.configuration),
    };
    main.replaceChildren(h("div", { class: "title" }, h("h1", {}, id), this.state), this.verdict, this.figures.element, this.flight,
      ...Object.values(this.sections), this.detail);
    for (const each of Object.values(this.sections)) each.hidden = true;
    document.title = `${id}: Ratchet`;
    document.getElementById("where").replaceChildren(h("span", { "aria-hidden": "true" }, " / "), id);
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
    this.changed.state(live.state, () => this.state.replaceChildren(badge(live.state)));
    this.lag.add(live.at, live.status?.lag);
    this.tick();
    if (this.newRows) {
      this.newRows = false;
      this.line.update(this.rows);
      this.histogram.update(this.rows);
    }
    this.sections.behind.hidden = !transactional || !(this.lag.points.length || this.parts.partitions?.total);
    this.sections.slow.hidden = !this.rows.length;
    this.partitions.hidden = !this.parts.partitions?.total;
    this.drawFlight(live);
    if (!this.partitions.hidden) this.drawPartitions(this.parts.partitions);
    this.drawGraph(live);
    this.drawFailures(transactional);
    this.drawRight(transactional);
    this.drawCommands(live);
    this.drawDrivers(live);
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
    const known = [
      ["Last commit", since === null ? "none" : ago(since), live.committed_at ? `at ${moment(live.committed_at)}` : "nothing is committed yet",
        "Time since the last transaction was committed. It grows when nothing comes in, too."],
      ["Committed up to", live.txid === null ? "nothing" : count(live.txid), "transaction", "The last transaction that every sink holds. They are numbered 1, 2, 3 and so on."],
    ];
    if (!status) return known;
    const recent = this.recentRate();
    return [
      ["Lag", compact(status.lag), "records", "Records in the source that are not committed yet.", status.lag > 0 && this.lag.slope() > 0],
      ["Rate", recent === null ? compact(status.rows_per_second) : compact(recent), recent === null ? "rows/s since the start" : "rows/s lately",
        "Source rows committed per second, up to now: over the last minute, or the last hundred transactions if those are fewer. If there are none, since the driver started."],
      ...known,
      ["In flight", count((live.in_flight ?? []).length), status.in_flight_rows ? `${compact(status.in_flight_rows)} rows` : "transactions", "Transactions that are planned and not committed yet."],
      ["Failed attempts", count(status.failures_last_hour ?? status.attempts_failed), status.failures_last_hour === undefined ? "since the start" : `in the last hour, ${count(status.attempts_failed)} since the start`,
        "Attempts that failed and were repeated. Nothing is lost or doubled by them, but they cost time.", status.failures_last_hour > 0],
      ["Bad records", count(status.bad_records), "records", "Committed records that could not be decoded: skipped, counted, or sent to dead letters.", status.bad_records > 0],
      ["Lost records", count(status.lost_records), "records", "Records that the source had removed before they were read, and that were skipped because on_data_loss says so.", status.lost_records > 0],
      ["Rows", compact(status.committed_rows), "committed since the start", "Source rows that this driver has committed."],
      ["Epoch", count(status.epoch), "of the leadership", "Grows with every election. Writers of an older epoch are refused by every sink."],
    ];
  }

  recentRate() {
    const rows = this.rows.slice(-100).filter((row) => row.closed_at && clock.since(row.closed_at) < 60);
    const seconds = rows.length > 1 ? clock.since(rows[0].closed_at) : 0;
    return seconds > 1 ? rows.slice(1).reduce((sum, row) => sum + row.rows, 0) / seconds : null;
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
      flight.slice(0, 30).map((each) => h("li", { title: "Transaction, its phase, seconds in this phase" },
        h("b", {}, count(each.txid)), ` ${each.phase}`, each.attempt > 1 ? `, attempt ${each.attempt}` : "", each.since_s === null ? "" : `, ${duration(each.since_s)}`)),
      flight.length > 30 ? h("li", {}, `and ${count(flight.length - 30)} more`) : null)] : [])));
  }

  drawPartitions(partitions) {
    this.changed.strip(partitions.all, () => this.strip.update(partitions.all));
    this.changed.worst(partitions.worst, () => this.worst.replaceChildren(
      h("details", { open: this.worst.querySelector("details")?.open }, h("summary", {}, `The ${count(partitions.worst.length)} that lag most, of ${count(partitions.total)}`),
        table([{ name: "partition" }, { name: "lag", number: true, why: "Records that are not committed yet" },
          { name: "committed up to", number: true, why: "The next offset to commit" }, { name: "in flight", number: true, why: "Offsets planned and not committed" },
          { name: "lost", number: true, why: "Offsets that were gone before they were read" }],
        partitions.worst.map(([name, ...rest]) => [name, ...rest.map(count)]), { label: "Partitions that lag most" }))));
  }

  drawGraph(live) {
    const shape = this.parts.about?.graph;
    const core = live.kind === "core" ? live.status?.components ?? {} : null;
    this.sections.graph.hidden = !shape?.components?.length && !core;
    if (shape?.components?.length) {
      const said = {};
      for (const [name, each] of Object.entries(core ?? {})) {
        said[name] = each.executed ? `${compact(each.executed)} executed` : each.emitted ? `${compact(each.emitted)} emitted` : "";
      }
      const notes = notesOf(shape, live.edges, said);
      const flows = flowsOf(shape, live.edges);
      this.changed.graph([shape, notes, flows], () => {
        const [left, top] = [this.graph.firstChild?.scrollLeft, this.graph.firstChild?.scrollTop];
        this.graph.replaceChildren(draw(shape, notes, flows));
        if (left || top) this.graph.firstChild.scrollTo(left, top);
      });
    }
    const columns = [["emitted", "Tuples that it emitted"], ["executed", "Tuples that it executed"], ["acked", "Tuples that it acked"], ["failed", "Tuples that it failed, or was told have failed"],
      ["completed", "Of a spout: tuples whose tree is complete"], ["timed_out", "Of a spout: tuples that took too long"], ["pending", "Of a spout: tuples whose fate is open"], ["waiting", "Of a bolt: tuples that have come and wait"], ["died", "Instances that an error ended"]];
    const states = live.status?.checkpoint?.states ?? {};
    this.changed.components([core, states], () => this.components.replaceChildren(...(core ? [h("h3", {}, "Components, in tuples"),
      table([{ name: "component" }, ...columns.map(([name, why]) => ({ name: name.replace("_", " "), number: true, why })), { name: "latency", number: true, why: "Mean time until a tree is complete" }],
        Object.entries(core).map(([name, each]) => [name, ...columns.map(([column]) => compact(each[column])), each.completed ? duration(each.latency_s / each.completed) : ""]), { label: "Components" })] : []),
      ...(Object.keys(states).length ? [h("h3", {}, "States, as of the last checkpoint"),
        table([{ name: "component" }, { name: "keys", number: true, why: "Keys in the state, of all its tasks" }, { name: "changed keys", number: true, why: "Keys that the last checkpoint has changed" },
          { name: "written", number: true, why: "Bytes of the keys and values that the last checkpoint has changed" }],
        Object.entries(states).map(([name, each]) => [name, count(each.keys), count(each.changed), `${compact(each.changed_bytes)} B`]), { label: "States" })] : [])));
  }

  drawFailures(transactional) {
    const failures = this.parts.failures ?? [];
    this.sections.failed.hidden = !this.parts.failures;
    this.changed.failures(failures, () => {
      if (!failures.length) {
        this.failures.replaceChildren(h("p", { class: "quiet" }, transactional ? "No attempt failed among the transactions that are recorded." : "No component has reported an error."));
        return;
      }
      const heads = transactional ? [{ name: "when" }, { name: "transaction" }, { name: "attempt", number: true }, { name: "outcome" }, { name: "reason", wide: true }]
        : [{ name: "when" }, { name: "component" }, { name: "what it did" }, { name: "reason", wide: true }];
      const rows = failures.map((each) => transactional
        ? [moment(each.at), h("button", { type: "button", class: "link", onclick: () => this.open(each.txid) }, count(each.txid)), each.attempts > 1 ? `${count(each.attempt - each.attempts + 1)} to ${count(each.attempt)}` : count(each.attempt), each.outcome, each.reason]
        : [moment(each.at), `${each.component}[${each.task}]`, each.outcome, each.trace ? h("details", {}, h("summary", {}, each.reason), h("pre", { tabindex: "0" }, each.trace)) : each.reason]);
      this.failures.replaceChildren(table(heads, rows, { label: "Failed attempts" }));
    });
  }

  drawRight(transactional) {
    const { headers = [], live, about } = this.parts;
    this.sections.right.hidden = !transactional;
    if (!transactional) return;
    const hidden = (about?.graph?.edges ?? []).filter((edge) => edge.target.endsWith("-dead-letters"));
    const letters = hidden.map((edge) => live.edges?.rows?.[edgeLabel(edge)]?.[1] ?? 0).reduce((all, each) => all + each, 0);
    const bad = live.status?.bad_records ?? null;
    this.changed.right([headers, letters, hidden.length, bad], () => this.right.replaceChildren(
      headers.length ? table([{ name: "sink", wide: true }, { name: "holds up to", number: true, why: "The last finished transaction, in the sink's own header" },
        { name: "opened", number: true, why: "The transaction whose commit was opened last" }, { name: "epoch", number: true, why: "Only writers of this leadership may write" }],
      headers.map((each) => [each.location, count(each.done), each.open === null ? "none" : count(each.open), count(each.epoch)]), { label: "Headers of the sinks" }) : h("p", { class: "quiet" }, "The driver knows the headers of its sinks while it leads; its own page shows them."),
      h("p", {}, hidden.length ? `${plural(letters, "dead letter")} in the last hundred transactions. ` : "",
        "To prove the figures: ", h("code", {}, "ratchet verify MODULE:TOPOLOGY"), " recomputes every sink from the source, and names what differs.")));
  }

  drawCommands(live) {
    this.sections.type.hidden = false;
    const name = /^[A-Za-z0-9][\w.-]*$/.test(this.id) ? this.id : "ID";
    const all = [
      live.state === "stopped" && ["ratchet run MODULE:TOPOLOGY", "runs it again, from where it stopped"],
      [`ratchet status ${name} --watch`, "the same figures in a terminal"],
      live.kind === "transactional" && [`ratchet history ${name} --failed`, "transactions that took more than one attempt, with reasons"],
      live.kind === "transactional" && ["waiting", "failed"].includes(live.state) && ["ratchet find-poison MODULE:TOPOLOGY", "narrows a batch down to the records that make it fail"],
      ["ratchet check MODULE:TOPOLOGY", "is every server there, and may we use it?"],
      live.kind === "transactional" && ["ratchet verify MODULE:TOPOLOGY", "recomputes the sinks from the source"],
    ].filter(Boolean);
    this.changed.commands(all, () => this.commands.replaceChildren(...all.map(([command, what]) => h("li", {}, h("code", { class: "command" }, command), h("span", {}, what)))));
  }

  drawDrivers(live) {
    this.sections.runs.hidden = false;
    this.changed.drivers(live.drivers.map(({ said_at, ...rest }) => rest), () => this.drivers.replaceChildren(live.drivers.length
      ? table([{ name: "role" }, { name: "host" }, { name: "process", number: true }, { name: "since" }, { name: "page" }],
        live.drivers.map((each) => [each.phase === "standby" ? "standby" : "leader", each.host, String(each.pid), day(each.started_at),
          each.here ? "this page" : each.page ? h("a", { href: each.page, rel: "noreferrer" }, each.page) : "none"]), { label: "Drivers" })
      : h("p", { class: "quiet" }, "No driver lives.")));
    const configuration = this.parts.about?.configuration;
    if (!configuration) return;
    this.changed.configuration(configuration, () => {
      const rows = (wanted) => configuration.filter(([, , set]) => set === wanted).map(([key, value]) => [h("code", {}, key), value]);
      const heads = [{ name: "key" }, { name: "value", wide: true }];
      this.configuration.replaceChildren(h("details", {}, h("summary", {}, "Configuration"), h("h3", {}, "Set"), table(heads, rows(true), { label: "Configuration that was set" }),
        h("h3", {}, "Default"), table(heads, rows(false), { label: "Defaults" })));
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
    Object.keys(each.rows).length ? table([{ name: "edge", wide: true }, { name: "rows", number: true }], Object.entries(each.rows).map(([edge, rows]) => [edge, count(rows)]), { label: "Rows over each edge" }) : null));
  const names = [...new Set(found.plan.flatMap(([, meta]) => (typeof meta === "object" ? Object.keys(meta) : [])))];
  const plan = found.plan.length ? [h("details", {}, h("summary", {}, `What it read: ${plural(found.partitions, "partition")}`),
    table([{ name: "partition" }, ...names.map((name) => ({ name: name.replaceAll("_", " "), number: true }))],
      found.plan.map(([partition, meta]) => [partition, ...names.map((name) => String(meta[name] ?? ""))]), { label: "Offsets by partition" }))] : [];
  return [found.attempts_total > found.attempts.length ? h("p", {}, `${count(found.attempts_total)} attempts; the last ${count(found.attempts.length)} are kept.`) : "", ...attempts, ...plan];
}

// --- both ---

const explain = document.getElementById("explain");
explain.addEventListener("click", () => {
  const on = document.body.classList.toggle("explained");
  explain.setAttribute("aria-pressed", String(on));
});

if (topologyId === null) showList();
else new TopologyPage(topologyId).start();
