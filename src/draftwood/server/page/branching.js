// @ts-check
/** Says so where the chosen drafter never guesses branches, and offers one that does. */

/** @import { Settings } from "./settings.js" */

import { button, byId } from "./dom.js";

const SOME = "ngram:nodes=8,branches=2"; // needs nothing but the prompt

/** @param {Settings} settings */
export function branchingHint(settings) {
  const hint = byId("tree-hint");
  const show = () => hint.replaceChildren(...words(settings));
  settings.addEventListener("change", show);
  show();
}

/** @param {Settings} settings @returns {(Node | string)[]} */
function words(settings) {
  const { drafter, branching } = settings;
  if (!drafter || drafter === "none" || branching.includes(drafter)) return [];
  const chain = `The drafter ${drafter} guesses chains: one path, without branches. `;
  if (!branching.length) return [`${chain}For trees, start the server with a drafter that branches, such as --offer ${SOME}.`];
  return [`${chain}For trees, use `, ...branching.map((name) => button(name, () => choose(settings, name)))];
}

/** @param {Settings} settings @param {string} name */
function choose(settings, name) {
  settings.use("drafter", name);
  byId("tree-picture").focus(); // the button is gone
}
