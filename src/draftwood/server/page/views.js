// @ts-check
/** Which part of the page is shown. A wide window has room for all but one: it chooses between chat and race only. */

import { load, save } from "./store.js";

const MAIN = ["chat", "race"];
const WIDE = matchMedia("(min-width: 60rem)");
const buttons = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("[data-view]")]);

/** Chat or race, whichever was shown last. */
export function mainView() {
  return document.body.dataset.main ?? MAIN[0];
}

/** @param {string} view */
export function showView(view) {
  if (MAIN.includes(view)) document.body.dataset.main = view;
  else if (WIDE.matches) return; // it is there already
  document.body.dataset.pane = view;
  for (const button of buttons) button.setAttribute("aria-current", String(button.dataset.view === view));
  save("view", mainView());
  dispatchEvent(new Event("resize")); // a picture that was hidden had no width
}

for (const button of buttons) button.addEventListener("click", () => showView(button.dataset.view ?? MAIN[0]));
WIDE.addEventListener("change", () => WIDE.matches && showView(mainView()));
showView(MAIN.includes(load("view")) ? load("view") : MAIN[0]);
