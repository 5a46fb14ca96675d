// @ts-check
/**
 * Where the nodes of a token tree go: depth to the right, one row a leaf. The first child stands in its parent's row and
 * the accepted one comes first, so what was kept is one straight line at the top:
 *
 *     root ── the ── cat ── sat
 *       │       └─── dog
 *       └──── a
 */

/** @import { Kind, Step } from "./types.js" */

import { shortened, visible } from "./format.js";

const CHARACTER = 7;
const PADDING = 14;
export const COLUMN_GAP = 26;
const MARGIN = 6;
export const BOX = 22;
const ROW = 28;
const LONGEST = 12;

/**
 * @typedef {object} Placed
 * @property {number} node  -1 for the token that the model added itself.
 * @property {number} parent  Its place in the list; -1 for the root.
 * @property {"root" | "rejected" | Kind} kind
 * @property {string} label
 * @property {number} depth
 * @property {number} x
 * @property {number} y
 * @property {number} width
 */

/**
 * @param {Step} step
 * @returns {{nodes: Placed[], width: number, height: number}}
 */
export function layout(step) {
  const nodes = flat(step);
  const children = nodes.map(() => /** @type {number[]} */ ([]));
  nodes.forEach(({ parent }, i) => parent >= 0 && children[parent].push(i));
  for (const list of children) list.sort((a, b) => rank(nodes[a]) - rank(nodes[b]) || a - b);
  const rows = place(nodes, children);
  const width = columns(nodes);
  return { nodes, width, height: rows * ROW - (ROW - BOX) + 2 * MARGIN };
}

/** The tree's nodes and, behind the accepted path, the token that the model added. @param {Step} step */
function flat(step) {
  const { tree, emitted } = step;
  /** @type {Placed[]} */
  const nodes = [];
  /** @type {(node: number, parent: number, kind: Placed["kind"], text: string) => void} */
  const add = (node, parent, kind, text) => {
    const label = shortened(visible(text), LONGEST);
    const depth = parent < 0 ? 0 : nodes[parent].depth + 1;
    nodes.push({ node, parent, kind, label, depth, x: 0, y: 0, width: [...label].length * CHARACTER + PADDING });
  };
  tree?.tokens.forEach((_, i) => {
    const kind = i === 0 ? "root" : tree.accepted[i] ? "accepted" : "rejected";
    add(i, tree.parents[i], kind, tree.texts[i]);
  });
  const own = emitted.at(-1);
  if (own && own.node === null) add(-1, lastKept(nodes), own.kind, own.text);
  return nodes;
}

/** @param {Placed[]} nodes */
function lastKept(nodes) {
  let deepest = nodes.length ? 0 : -1;
  nodes.forEach((node, i) => {
    if (node.kind === "accepted" && node.depth > nodes[deepest].depth) deepest = i;
  });
  return deepest;
}

/** @param {Placed} node */
function rank(node) {
  return node.kind === "rejected" ? 1 : 0;
}

/**
 * Rows, depth first and without recursion: a chain may be long.
 * @param {Placed[]} nodes @param {number[][]} children
 */
function place(nodes, children) {
  let rows = 0;
  const waiting = nodes.length ? [0] : [];
  const starts = new Set(waiting);
  for (let i = waiting.pop(); i !== undefined; i = waiting.pop()) {
    if (starts.has(i)) rows += 1;
    nodes[i].y = MARGIN + (rows - 1) * ROW;
    children[i].slice(1).forEach((child) => starts.add(child));
    waiting.push(...children[i].toReversed());
  }
  return rows;
}

/** Every depth is as wide as its widest label. @param {Placed[]} nodes */
function columns(nodes) {
  /** @type {number[]} */
  const widths = [];
  for (const { depth, width } of nodes) widths[depth] = Math.max(widths[depth] ?? 0, width);
  /** @type {number[]} */
  const starts = [];
  let x = MARGIN;
  widths.forEach((width, depth) => {
    starts[depth] = x;
    x += width + COLUMN_GAP;
  });
  for (const node of nodes) node.x = starts[node.depth];
  return x - COLUMN_GAP + MARGIN;
}
