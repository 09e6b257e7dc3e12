// Everything one can do: dialogs, commands, and what came of them.

import { $, el, plain, text } from "./dom.js";
import { Refused } from "./link.js";
import { where } from "./view.js";

const KEPT = 40;
const SHOWN_MS = 6000;
const VERBS = {
  promote: ["/promote", "Promoting", "is on the device"],
  pin: ["/pin", "Pinning", "is pinned"],
  unpin: ["/unpin", "Unpinning", "may be a victim again"],
  prefetch: ["/prefetch", "Staging", "is in host memory"],
  replace: ["/replace", "Replacing", "has a new version"],
  load: ["/load", "Loading", "is loaded"],
  swap: ["/swap", "Moving", "is in its slot"],
  unload: ["/unload", "Unloading", "is unloaded"],
};

export class Acts {
  constructor(link) {
    this.link = link;
    this.view = null;
    this.name = null;
    this.asking = null;
    this.sure = 0;
    // Not submit buttons: Enter in a field would press the first of them.
    for (const button of document.querySelectorAll("[data-close]")) {
      button.addEventListener("click", () => button.closest("dialog").close(""));
    }
    $("load-button").addEventListener("click", () => this.load(null));
    $("load-dialog").addEventListener("close", () => this.#loadClosed());
    $("adapter-dialog").addEventListener("click", (e) => this.#pressed(e.target.dataset?.do));
    $("adapter-dialog").addEventListener("close", () => (this.name = null));
    $("adapter-path").addEventListener("keydown", (e) => {
      if (e.key !== "Enter") return;
      e.preventDefault();
      this.#pressed("replace");
    });
    $("story").addEventListener("toggle", () => this.#story());
  }

  // keys -------------------------------------------------------------------------------------
  askKey(why) {
    this.asking ??= new Promise((resolve) => {
      const dialog = $("key-dialog"), input = $("key");
      text($("key-why"), why);
      input.value = "";
      dialog.returnValue = "";
      dialog.addEventListener("close", () => {
        const key = dialog.returnValue === "ok" ? input.value.trim() : "";
        input.value = "";
        this.asking = null;
        resolve(key || null);
      }, { once: true });
      dialog.showModal();
    });
    return this.asking;
  }

  // commands ---------------------------------------------------------------------------------
  async run(verb, name, more = {}) {
    const [path, doing, done] = VERBS[verb];
    return this.#command(`${doing} ${name}`, `v1/lora${path}`, { name, ...more }, (reply) => {
      if (reply.outcome === "unchanged") return `${name}: the content is the same, nothing changed`;
      if (reply.outcome === "still-draining") return `${name} is unloaded; requests still finish on it`;
      const parts = [`${name} ${done}`];
      if (reply.slot >= 0) parts.push(`slot ${reply.slot}, generation ${reply.generation}`);
      if (reply.evicted) parts.push(`${reply.evicted} left`);
      if (verb !== "pin" && verb !== "unpin") parts.push(`${plain(reply.seconds * 1e3)} ms`);
      return parts.join("; ");
    });
  }

  swap(name, slot) {
    if (slot.name === name) return;
    return this.run("swap", name, { slot: slot.index });
  }

  async #command(title, path, body, say) {
    const line = this.#note(`${title} …`, "busy");
    try {
      const reply = await this.link.admin(path, body);
      if (reply) this.#settle(line, say(reply), "good");
      else this.#settle(line, `${title}: no key, not done`, "off");
      return reply;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.#settle(line, `${title}: ${error.message}`, "bad", error.code);
      return null;
    }
  }

  #note(words, kind) {
    const line = el("li", { class: kind }, el("span", { class: "mark" }), el("span", { class: "words" }, words),
      el("time", {}, new Date().toLocaleTimeString()));
    $("activity").prepend(line);
    $("activity-none").hidden = true;
    while ($("activity").childElementCount > KEPT) $("activity").lastElementChild.remove();
    return line;
  }

  #settle(line, words, kind, code = "") {
    line.className = kind;
    text(line.querySelector(".words"), words);
    if (code) line.querySelector(".words").before(el("code", {}, code));
    this.toast(words, kind, code);
  }

  toast(words, kind, code = "") {
    const close = el("button", { type: "button", class: "quiet", "aria-label": "Dismiss", onclick: () => note.remove() }, "✕");
    const note = el("div", { class: `toast ${kind}` }, el("span", { class: "mark" }), el("p", {}, ...(code ? [el("code", {}, code), " "] : []), words), close);
    $("toasts").append(note);
    while ($("toasts").childElementCount > 4) $("toasts").firstElementChild.remove();
    if (kind !== "bad") setTimeout(() => note.remove(), SHOWN_MS);
  }

  // the dialog of one adapter ------------------------------------------------------------------
  open(name) {
    this.name = name;
    this.sure = 0;
    $("adapter-path").value = "";
    $("story").open = false;
    this.refresh();
    if (this.name) $("adapter-dialog").showModal();
  }

  refresh() {
    if (this.name == null) return;
    const data = this.view.data;
    const adapter = data.adapters.find((a) => a.name === this.name);
    if (!adapter) {
      $("adapter-dialog").close();
      return;
    }
    const slot = data.slots.find((s) => s.index === adapter.slot);
    text($("adapter-title"), adapter.name);
    text($("adapter-where"), where(adapter, slot));
    $("adapter-acts").disabled = $("adapter-content").disabled = !data.admin;
    $("story").hidden = !data.admin;
    this.view.slotChoices($("adapter-slot"), null);
    const set = (verb, hidden) => (document.querySelector(`#adapter-dialog [data-do=${verb}]`).hidden = hidden);
    set("promote", adapter.level === "device");
    set("pin", adapter.level !== "device" || slot?.pinned);
    set("unpin", adapter.level !== "device" || !slot?.pinned);
    set("prefetch", adapter.level !== "cold");
    const isDefault = data.default === adapter.name;
    const button = document.querySelector("#adapter-dialog [data-do=default]");
    text(button, isDefault ? "Make base the default" : "Make default");
    text(document.querySelector("#adapter-dialog [data-do=unload]"), this.sure ? "Unload now" : "Unload");
    text($("unload-note"), this.sure ? "New requests are refused; running ones finish." : "");
  }

  #pressed(verb) {
    const name = this.name;
    if (!verb || name == null) return;
    const path = $("adapter-path").value.trim();
    if (verb === "unload" && !this.sure++) return this.refresh();
    if (verb === "default") {
      const adapter = this.view.data.default === name ? null : name;
      const words = `${adapter ?? "base"} is the default`;
      this.#command(`Making ${adapter ?? "base"} the default`, "v1/lora/active", { adapter }, () => words);
    } else if (verb === "replace") {
      if (!path) return $("adapter-path").focus();
      this.run("replace", name, { path });
    } else if (verb === "swap") {
      const slot = this.view.data.slots[Number($("adapter-slot").value)];
      if (slot) this.swap(name, slot);
    } else this.run(verb, name);
    if (verb !== "pin" && verb !== "unpin") $("adapter-dialog").close();
  }

  async #story() {
    if (!$("story").open || this.name == null) return;
    const name = this.name;
    $("story-lines").replaceChildren();
    try {
      const found = await this.link.admin(`v1/lora/inspect/${encodeURIComponent(name)}`);
      if (!found) $("story").open = false;
      else if (this.name === name) $("story-lines").append(...found.story.map((line) => el("li", {}, line)));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      $("story-lines").append(el("li", {}, `${error.code}: ${error.message}`));
    }
  }

  // loading a new one ----------------------------------------------------------------------------
  load(slot) {
    this.view.slotChoices($("load-slot"), "any");
    $("load-slot").value = slot ?? "";
    $("load-dialog").returnValue = "";
    $("load-dialog").showModal();
  }

  async #loadClosed() {
    if ($("load-dialog").returnValue !== "ok") return;
    const name = $("load-name").value.trim(), path = $("load-path").value.trim();
    const slot = $("load-slot").value, pin = $("load-pin").checked;
    const reply = await this.run("load", name, { path, pin, ...(slot === "" ? {} : { slot: Number(slot) }) });
    if (reply) $("load-dialog").querySelector("form").reset();
  }
}
