// @ts-check
/** A step made up by hand, to show what a tree with branches looks like before there is a real one. */

/** @import { Step } from "./types.js" */

/** text, parent, the model's probability. @type {[string, number, number | null][]} */
const NODES = [
  [" sat", -1, null],
  [" on", 0, 0.81],
  [" down", 0, 0.12],
  [" the", 1, 0.74],
  [" a", 1, 0.17],
  [" by", 2, 0.3],
  [" mat", 3, 0.52],
  [" sofa", 3, 0.21],
  [" chair", 4, 0.2],
  [" and", 6, 0.22],
];
const KEPT = [1, 3, 6];

/** @type {Step} */
export const EXAMPLE = {
  choice: 0,
  step: 0,
  seconds: 0,
  drafter: "example",
  law: "example",
  batch: 1,
  rows: NODES.length,
  tree: {
    tokens: NODES.map((_, i) => i),
    texts: NODES.map(([text]) => text),
    parents: NODES.map(([, parent]) => parent),
    p: NODES.map(([, , p]) => p),
    q: NODES.map(() => null),
    accepted: NODES.map((_, i) => i === 0 || KEPT.includes(i)),
  },
  emitted: [
    ...KEPT.map((node, i) => emitted(node, NODES[node][0], "accepted", i + 1, NODES[node][2])),
    { ...emitted(NODES.length, ".", "correction", KEPT.length + 1, 0.61), node: null },
  ],
};

/** @param {number} node @param {string} text @param {"accepted" | "correction"} kind @param {number} depth @param {number | null} p */
function emitted(node, text, kind, depth, p) {
  return { token: node, text, kind, depth, node, p, q: null };
}
