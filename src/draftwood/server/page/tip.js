// @ts-check
/** The one tooltip of the page. */

import { byId, el } from "./dom.js";

const GAP = 8;
const tip = byId("tip");
/** @type {Element | null} */
let owner = null;

/**
 * Show facts beside an element.
 * @param {Element} anchor
 * @param {string} title
 * @param {[string, string][]} facts
 * @param {string} [kind]  Colours the title as tokens of that kind.
 */
export function showTip(anchor, title, facts, kind = "") {
  const list = el("dl");
  for (const [name, value] of facts) list.append(el("dt", {}, name), el("dd", {}, value));
  tip.replaceChildren(el("p", kind ? { class: "token", "data-kind": kind } : {}, title), list);
  tip.hidden = false;
  owner = anchor;
  place(anchor);
}

/** Hide it; with an element, only if it is inside of that. @param {Element} [within] */
export function hideTip(within) {
  if (within && owner && owner.isConnected && !within.contains(owner)) return;
  tip.hidden = true;
  owner = null;
}

/** Above the element, or below where there is no room; never outside of the window. @param {Element} anchor */
function place(anchor) {
  // A token may be broken over two lines: stay with its first piece.
  const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(GAP, Math.min(at.left, document.documentElement.clientWidth - width - GAP));
  const above = at.top - height - GAP;
  tip.style.left = `${left}px`;
  tip.style.top = `${above >= GAP ? above : at.bottom + GAP}px`;
}

addEventListener("scroll", () => hideTip(), { capture: true, passive: true });
