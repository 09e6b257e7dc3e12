// The page: one link, one view, one set of acts.

import { $, text } from "./dom.js";
import { Acts } from "./acts.js";
import { Link } from "./link.js";
import { View } from "./view.js";

let isLost = false;
let locked = false;

const link = new Link({
  state(data) {
    if (isLost) acts.toast("Connected again", "good");
    isLost = locked = false;
    pill("live", data.dead ? "dead" : "live");
    banner(data.dead ? `The device is dead (${data.dead}): nothing is served until a restart.` : "");
    $("key-button").hidden = !data.admin && !link.hasKey;
    view.show(data);
    acts.refresh();
  },
  lost(error, seconds) {
    isLost = true;
    view.lost();
    pill("lost", "lost");
    banner(`${error.code}: ${error.message}. Trying again in ${seconds} s.`);
  },
  async unauthorized(hadKey) {
    view.lost();
    pill("locked", "lost");
    banner("This server asks for a key.");
    if (locked && !hadKey) return;
    locked = true;
    const key = await acts.askKey(hadKey ? "That key is not a key of this server." : "This server asks for an API key, or an admin key.");
    if (key) link.setKey(key);
  },
  askKey: (why) => acts.askKey(why),
});

const acts = new Acts(link);
const view = new View(acts);
acts.view = view;

function pill(words, kind) {
  text($("link"), words);
  $("link").dataset.kind = kind;
}

function banner(words) {
  $("banner").hidden = !words;
  text($("banner"), words);
}

$("key-button").addEventListener("click", async () => {
  const key = await acts.askKey("An admin key unlocks adapter commands; an API key is enough to look.");
  if (key) link.setKey(key);
});
link.now();
