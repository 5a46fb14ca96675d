// @ts-check
/** Guesses of a step that were not kept, told at the place where they stood. */

/** @import { Step, Tree } from "./types.js" */

import { shortened, visible } from "./format.js";

const MOST = 2; // branches told at one place
const LONGEST = 20; // characters of each

/**
 * For every token that a step emitted: the branches guessed in its place that were rejected, likeliest first as the
 * drafter gave them. Of a branch that forks again only its first path is told.
 * @param {Step} step
 * @returns {string[][]}
 */
export function rejectedBefore({ tree, emitted }) {
  return emitted.map((_, i) => {
    const parent = i === 0 ? 0 : emitted[i - 1].node;
    return tree && parent !== null ? branches(tree, parent) : [];
  });
}

/** @param {Tree} tree @param {number} parent */
function branches(tree, parent) {
  return tree.parents.flatMap((above, node) => (above === parent && !tree.accepted[node] ? [firstPath(tree, node)] : []));
}

/** @param {Tree} tree @param {number} node */
function firstPath(tree, node) {
  let text = "";
  for (let at = node; at >= 0; at = tree.parents.indexOf(at)) text += tree.texts[at];
  return text;
}

/** @param {string[]} texts  Branches. */
export function rejectedWords(texts) {
  const told = texts.slice(0, MOST).map((text) => shortened(visible(text), LONGEST));
  return told.join(" ¦ ") + (texts.length > MOST ? ` ¦ +${texts.length - MOST}` : "");
}
