// Draws a state. Owns what is on the screen, nothing else; asks `acts` for everything one can do.

import { $, bytes, count, el, ms, options, plain, sync, text } from "./dom.js";
import { Chart } from "./chart.js";

const SPAN = 300;
const DOTS = 12;
const STEPS = ["QUEUED", "STAGING", "PLACING", "COMMITTING"];
const DOING = {
  QUEUED: "queued",
  STAGING: "reading and packing",
  PLACING: "waiting for a slot",
  COMMITTING: "writing its slot",
};
const STATES = {
  EMPTY: "empty",
  STAGING: "being written",
  READY: "idle",
  IN_USE: "in use",
  DRAINING: "draining",
};

export class View {
  constructor(acts) {
    this.acts = acts;
    this.data = null;
    this.rows = [];
    this.last = -1;
    this.dragged = null;
    this.before = null;
    this.rate = new Chart($("rate"), ["s1"], ([n]) => `${plain(n)} tokens per second`);
    this.gap = new Chart($("gap"), ["s1", "s2"], ([a, b]) =>
      a == null ? "no tokens" : `median ${ms(a)}, 99th percentile ${ms(b)}`, true);
    $("filter").addEventListener("input", () => this.adapters());
  }

  show(data) {
    this.data = data;
    document.body.classList.remove("stale");
    text($("model"), data.model);
    text($("model-more"), `${data.family} · ${data.dtype}`);
    document.title = `rota · ${data.model}`;
    text($("version"), `rota ${data.version}`);
    const numbers = [
      [data.tokens, "tokens"], [data.steps, "steps"], [data.commits, "commits"],
      [data.evicted, "evictions"], [data.stage_failures, "failed stagings"],
    ];
    text($("counts"), numbers.map(([n, what]) => `${count(n)} ${what}`).join(" · "));
    $("load-button").hidden = !data.admin;
    this.pulse(data.pulse);
    this.tiles();
    this.slots();
    this.adapters();
  }

  lost() {
    document.body.classList.add("stale");
    this.before = null;
  }

  // Rows of [tokens, median, p99], one a second; `last` is the second of the last one.
  pulse({ first, bins }) {
    const last = first + bins.length - 1;
    if (last < this.last || first > this.last + 1) this.rows = [];
    else bins = bins.slice(Math.max(0, this.last + 1 - first));
    this.rows = [...this.rows, ...bins].slice(-SPAN);
    this.last = last;
    this.rate.show(this.rows.map(([tokens]) => [tokens]), last);
    this.gap.show(this.rows.map(([, p50, p99]) => [p50, p99]), last);
  }

  tiles() {
    const d = this.data, now = performance.now();
    if (!this.before || d.tokens < this.before.tokens) this.before = { at: now, tokens: d.tokens, rate: null };
    else if (now - this.before.at >= 900) {
      const rate = ((d.tokens - this.before.tokens) * 1000) / (now - this.before.at);
      this.before = { at: now, tokens: d.tokens, rate };
    }
    text($("t-rate"), plain(this.before.rate));
    const recent = this.rows.slice(-3).reverse().find(([, p50]) => p50 != null);
    text($("t-gap"), recent ? `${plain(recent[1])} / ${plain(recent[2])} ms` : "–");
    text($("t-running"), count(d.running));
    text($("t-waiting"), count(d.waiting));
    const share = d.kv_total ? d.kv_used / d.kv_total : 0;
    text($("t-kv"), `${Math.round(share * 100)} %`);
    $("t-kv").title = `${count(d.kv_used)} of ${count(d.kv_total)} blocks in use, ${count(d.kv_cached)} kept for prefixes`;
    $("t-kv-cached").style.width = `${d.kv_total ? (d.kv_cached / d.kv_total) * 100 : 0}%`;
    $("t-kv-bar").style.width = `${share * 100}%`;
    text($("t-default"), d.default ?? "base");
    $("t-default").title = d.default ?? "base";
  }

  // slots ------------------------------------------------------------------------------------
  slots() {
    const d = this.data;
    const used = d.slots.filter((s) => s.name).length;
    text($("slots-note"), `${used} of ${d.slots_total} hold an adapter`);
    sync($("rack"), d.slots, (s) => s.index, (s) => this.makeSlot(s), (n, s) => this.fillSlot(n, s));
    const more = d.slots_total - d.slots.length;
    $("rack-more").hidden = !more;
    text($("rack-more"), `and ${count(more)} more slots`);
  }

  makeSlot(slot) {
    const parts = {
      state: el("span", { class: "state" }),
      name: el("button", { type: "button", class: "name link" }),
      none: el("span", { class: "none" }),
      gen: el("span", { class: "muted" }),
      leases: el("span", { class: "leases" }),
      dots: el("span", { class: "dots", "aria-hidden": "true" }),
      note: el("p", { class: "note" }),
      pin: el("button", { type: "button", class: "pin", title: "A pinned adapter is never a victim" }),
      here: el("button", { type: "button", class: "quiet" }, "Load here…"),
    };
    const node = el("li", { class: "slot" },
      el("div", { class: "top" }, el("span", { class: "index" }, String(slot.index)), parts.state),
      el("div", { class: "who" }, parts.name, parts.none, parts.gen),
      parts.dots, el("div", { class: "hold" }, parts.leases, parts.pin), parts.note, parts.here);
    node.parts = parts;
    parts.name.addEventListener("click", () => this.acts.open(node.holds.name));
    parts.pin.addEventListener("click", () =>
      this.acts.run(node.holds.pinned ? "unpin" : "pin", node.holds.name));
    parts.here.addEventListener("click", () => this.acts.load(node.holds.index));
    node.addEventListener("dragover", (e) => {
      if (this.dragged == null) return;
      e.preventDefault();
      e.dataTransfer.dropEffect = "move";
      node.classList.add("over");
    });
    node.addEventListener("dragleave", () => node.classList.remove("over"));
    node.addEventListener("drop", (e) => {
      e.preventDefault();
      node.classList.remove("over");
      if (this.dragged != null) this.acts.swap(this.dragged, node.holds);
    });
    return node;
  }

  fillSlot(node, slot) {
    node.holds = slot;
    const { parts } = node, admin = this.data.admin;
    node.dataset.state = slot.state;
    text(parts.state, STATES[slot.state] ?? slot.state);
    parts.name.hidden = parts.gen.hidden = !slot.name;
    text(parts.name, slot.name ?? "");
    parts.name.title = slot.name ?? "";
    parts.none.hidden = !!slot.name;
    text(parts.none, slot.state === "STAGING" && slot.coming ? slot.coming : "no adapter");
    text(parts.gen, slot.name ? `g${slot.generation}` : "");
    parts.gen.title = `generation ${slot.generation}`;
    const dots = Math.min(slot.leases, DOTS);
    if (parts.dots.childElementCount !== dots) {
      parts.dots.replaceChildren(...Array.from({ length: dots }, () => el("i")));
    }
    text(parts.leases, slot.name ? leases(slot.leases) : "");
    const coming = slot.state === "DRAINING" && slot.coming;
    parts.note.hidden = !coming;
    text(parts.note, coming ? `for ${slot.coming}` : "");
    parts.pin.hidden = !slot.name || (!admin && !slot.pinned);
    parts.pin.disabled = !admin;
    parts.pin.setAttribute("aria-pressed", String(slot.pinned));
    text(parts.pin, slot.pinned ? "pinned" : "pin");
    parts.here.hidden = !admin || slot.state !== "EMPTY";
  }

  // adapters -----------------------------------------------------------------------------------
  adapters() {
    const d = this.data;
    if (!d) return;
    const { device, host, cold } = d.levels;
    text($("adapters-note"), `${count(device)} on the device · ${count(host)} in host memory · ${count(cold)} cold`);
    $("filter").hidden = d.adapters.length < 9 && !$("filter").value;
    const wanted = $("filter").value.toLowerCase();
    const shown = d.adapters
      .filter((a) => a.name.toLowerCase().includes(wanted))
      .sort((a, b) => (a.name < b.name ? -1 : 1));
    sync($("adapters"), shown, (a) => a.name, (a) => this.makeAdapter(a), (n, a) => this.fillAdapter(n, a), this.dragged == null);
    const more = d.adapters_total - d.adapters.length;
    const lines = [];
    if (more) lines.push(`and ${count(more)} more, further from the device`);
    if (!shown.length) lines.push(wanted ? "No adapter of this name." : "No adapters yet.");
    if (!d.admin) lines.push("Adapter commands are off: this server was started without an admin key.");
    text($("adapters-more"), lines.join(" "));
  }

  makeAdapter(adapter) {
    const parts = {
      name: el("button", { type: "button", class: "name link", title: adapter.name }, adapter.name),
      level: el("span", { class: "level" }),
      gen: el("span", { class: "muted gen" }),
      steps: el("span", { class: "steps", role: "img" }, ...STEPS.map(() => el("i"))),
      act: el("button", { type: "button", class: "quiet" }),
      more: el("button", { type: "button", class: "quiet", "aria-label": `More about ${adapter.name}` }, "⋯"),
    };
    const node = el("li", { class: "adapter" }, el("span", { class: "grip", "aria-hidden": "true" }, "⠿"),
      parts.name, parts.gen, parts.level, parts.steps, parts.act, parts.more);
    node.parts = parts;
    const { name } = adapter;
    parts.name.addEventListener("click", () => this.acts.open(name));
    parts.more.addEventListener("click", () => this.acts.open(name));
    parts.act.addEventListener("click", () => this.acts.run("promote", name));
    node.addEventListener("dragstart", (e) => {
      this.dragged = name;
      e.dataTransfer.effectAllowed = "move";
      e.dataTransfer.setData("text/plain", name);
      document.body.classList.add("dragging");
    });
    node.addEventListener("dragend", () => {
      this.dragged = null;
      document.body.classList.remove("dragging");
    });
    return node;
  }

  fillAdapter(node, adapter) {
    const { parts } = node, { admin } = this.data;
    node.draggable = admin;
    node.classList.toggle("movable", admin);
    node.dataset.level = adapter.level;
    const where = { device: `slot ${adapter.slot}`, host: "host", cold: "cold" }[adapter.level];
    text(parts.level, where);
    text(parts.gen, adapter.generation ? `g${adapter.generation}` : "");
    const step = STEPS.indexOf(adapter.doing);
    parts.steps.hidden = step < 0;
    if (step >= 0) {
      parts.steps.setAttribute("aria-label", `${adapter.job}: ${DOING[adapter.doing]}`);
      parts.steps.title = `${adapter.job}: ${DOING[adapter.doing]}`;
      [...parts.steps.children].forEach((dot, i) => (dot.className = i < step ? "done" : i === step ? "now" : ""));
    }
    parts.act.hidden = !admin || adapter.level === "device" || step >= 0;
    text(parts.act, "Promote");
    parts.act.setAttribute("aria-label", `Promote ${adapter.name} into a slot`);
  }

  slotChoices(select, first) {
    const pairs = (this.data?.slots ?? []).map((s) => [s.index, `${s.index}: ${s.name ?? STATES[s.state]}`]);
    options(select, first ? [["", first], ...pairs] : pairs);
  }
}

function leases(n) {
  return n === 0 ? "no leases" : n === 1 ? "1 lease" : `${count(n)} leases`;
}

export function where(adapter, slot) {
  const level = {
    device: `in slot ${adapter.slot}${slot?.pinned ? ", pinned" : ""}, ${leases(slot?.leases ?? 0)}`,
    host: "staged in host memory: its promotion is one copy",
    cold: "cold: its files are read when it is asked for",
  }[adapter.level];
  const doing = adapter.doing ? `; ${adapter.job}: ${DOING[adapter.doing]}` : "";
  return `Generation ${adapter.generation}, ${level}${doing}.`;
}
