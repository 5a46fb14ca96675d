// @ts-check
/** Puts the page together. */

import { model, told } from "./api.js";
import { branchingHint } from "./branching.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { LivePanel } from "./live.js";
import { Race } from "./race.js";
import { Settings } from "./settings.js";
import { themeButton } from "./theme.js";
import { hideTip } from "./tip.js";
import { TreePanel } from "./tree.js";
import { mainView, showView } from "./views.js";

const settings = new Settings();
const tree = new TreePanel();
const chat = new Chat(settings, tree);
const race = new Race(settings, tree);
new LivePanel();
branchingHint(settings);
themeButton(byId("theme"));
addEventListener("keydown", shortcut);
introduce();

/** Who is there, and what it offers. */
async function introduce() {
  try {
    const card = await model();
    chat.model = race.model = card.id;
    byId("model").textContent = card.id;
    document.title = `${card.id} – Draftwood`;
    settings.offer(card);
  } catch (error) {
    const notice = byId("notice");
    notice.hidden = false;
    notice.textContent = `${told(error)} Reload the page to try again.`;
  }
}

/** Escape stops, a slash goes to the text box. @param {KeyboardEvent} event */
function shortcut(event) {
  if (event.key === "Escape" && !event.isComposing) {
    hideTip();
    chat.stop();
    race.stop();
  }
  const typing = event.target instanceof Element && event.target.closest("input, textarea, select");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  showView(mainView());
  byId(mainView() === "race" ? "race-prompt" : "message").focus();
}
