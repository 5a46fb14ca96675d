// @ts-check
/** The picture of a step's tree, and the walk through the steps of an answer. */

/** @import { Step } from "./types.js" */
/** @import { Placed } from "./layout.js" */

import { byId, el, svg, throttled } from "./dom.js";
import { chance, counted, drawn, duration, visible } from "./format.js";
import { EXAMPLE } from "./example.js";
import { BOX, COLUMN_GAP, layout } from "./layout.js";
import { hideTip, showTip } from "./tip.js";

const SMALLEST = 0.62; // labels are unreadable below that: the picture scrolls instead
const CALM = matchMedia("(prefers-reduced-motion: reduce)").matches ? 600 : 150; // milliseconds between pictures

const NAMES = {
  root: "last certain token",
  accepted: "accepted guess",
  rejected: "rejected guess",
  bonus: "bonus token",
  correction: "correction",
  plain: "plain token",
};

/** Shows one step of one answer; follows the newest until the user selects another. */
export class TreePanel {
  constructor() {
    this.picture = byId("tree-picture");
    this.place = byId("step-place");
    this.words = byId("tree-words");
    this.back = byId("step-back");
    this.on = byId("step-on");
    this.followButton = byId("step-follow");
    /** @type {Step[]} */
    this.steps = [];
    /** @type {Step[]} */
    this.newest = [];
    this.index = -1;
    this.following = true;
    this.redraw = throttled(CALM, () => this.#draw());
    this.back.addEventListener("click", () => this.#walk(-1));
    this.on.addEventListener("click", () => this.#walk(1));
    this.followButton.addEventListener("click", () => this.#follow(!this.following));
    this.picture.addEventListener("keydown", (event) => this.#key(event));
    this.picture.addEventListener("pointerover", (event) => this.#point(event.target));
    this.picture.addEventListener("pointerleave", () => hideTip(this.picture));
    addEventListener("resize", this.redraw);
    this.#buttons();
    this.redraw();
  }

  /** The step that is drawn: an example as long as there is none. */
  get #shown() {
    return this.steps[this.index] ?? EXAMPLE;
  }

  /** A list that will grow, or has just grown. @param {Step[]} steps */
  grown(steps) {
    this.newest = steps;
    if (this.following) this.#jump(steps, steps.length - 1);
    else this.#buttons();
  }

  /** Show this step. @param {Step[]} steps @param {number} index */
  pick(steps, index) {
    this.following = false;
    this.#jump(steps, index);
  }

  /** Nothing to see any more. */
  clear() {
    this.following = true;
    this.newest = [];
    this.#jump([], -1);
  }

  /** @param {Step[]} steps @param {number} index */
  #jump(steps, index) {
    this.steps = steps;
    this.index = index;
    this.#buttons();
    this.redraw();
  }

  /** @param {number} by */
  #walk(by) {
    const index = Math.max(0, Math.min(this.index + by, this.steps.length - 1));
    if (this.steps.length) this.pick(this.steps, index);
  }

  /** @param {boolean} following */
  #follow(following) {
    this.following = following;
    if (following) this.grown(this.newest);
    else this.#buttons();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#walk(by);
  }

  #buttons() {
    const { index, steps } = this;
    this.place.textContent = steps.length ? `${index + 1} / ${steps.length}` : "example";
    // Not `disabled`: that would throw the focus away at the last step.
    this.back.setAttribute("aria-disabled", String(index <= 0));
    this.on.setAttribute("aria-disabled", String(index >= steps.length - 1));
    this.followButton.setAttribute("aria-pressed", String(this.following));
  }

  #draw() {
    hideTip(this.picture);
    const step = this.#shown;
    this.words.textContent = step === EXAMPLE ? toldExample() : told(step);
    const picture = draw(step, this.picture.clientWidth);
    picture.setAttribute("aria-label", this.words.textContent);
    const label = step === EXAMPLE ? [el("p", { class: "example" }, "Example")] : [];
    this.picture.replaceChildren(...label, picture);
  }

  /** @param {EventTarget | null} target */
  #point(target) {
    const group = target instanceof Element ? target.closest("[data-node]") : null;
    if (group instanceof SVGElement) explain(group, this.#shown);
    else hideTip(this.picture);
  }
}

/** A step in words. @param {Step} step */
export function told(step) {
  const time = `${duration(step.seconds)}, batch of ${step.batch} (${counted(step.rows, "row")})`;
  const own = step.emitted.at(-1);
  const added = own && own.node === null ? `${NAMES[own.kind]} “${visible(own.text)}”` : "";
  if (!step.tree) return `Step ${step.step}: nothing was guessed${added && `; ${added}`}. ${time}.`;
  const kept = step.emitted.filter((token) => token.kind === "accepted").length;
  const guesses = `${counted(step.tree.tokens.length - 1, "guess", "guesses")} by ${step.drafter}`;
  return `Step ${step.step}: ${guesses}, ${kept} kept by ${step.law}${added && `, then ${added}`}. ${time}.`;
}

/** What the example shows. */
function toldExample() {
  const { tree, emitted } = EXAMPLE;
  const guesses = counted((tree?.tokens.length ?? 1) - 1, "guess", "guesses");
  const kept = emitted.filter((token) => token.kind === "accepted").length;
  return `Example: of ${guesses} the model keeps ${kept} and adds its own “${emitted.at(-1)?.text}”, ${emitted.length} tokens in one step. The first answer replaces it.`;
}

/** @param {Step} step @param {number} room  Pixels there are. */
function draw(step, room) {
  const { nodes, width, height } = layout(step);
  const scale = Math.max(SMALLEST, Math.min(1, room / width));
  const size = { width: Math.ceil(width * scale), height: Math.ceil(height * scale) };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", ...size });
  // Kept edges last, above the others.
  const order = nodes.map((_, i) => i).sort((a, b) => Number(isKept(nodes[a])) - Number(isKept(nodes[b])));
  picture.append(...order.flatMap((i) => edge(nodes, i, step)), ...nodes.map(box));
  return picture;
}

/** @param {Placed} node */
function isKept(node) {
  return node.kind !== "rejected";
}

/**
 * A line from the parent; the likelier the model found the node, the thicker.
 * @param {Placed[]} nodes @param {number} i @param {Step} step
 */
function edge(nodes, i, step) {
  const node = nodes[i];
  const parent = nodes[node.parent];
  if (!parent) return [];
  const [x1, y1, x2, y2] = [parent.x + parent.width, parent.y + BOX / 2, node.x, node.y + BOX / 2];
  const bend = x2 - COLUMN_GAP / 2;
  const p = node.node < 0 ? step.emitted.at(-1)?.p : step.tree?.p[node.node];
  const attributes = { class: `edge ${node.kind}`, "stroke-width": (1 + 2 * (p ?? 0)).toFixed(2) };
  const corner = `H${bend - 6}q6 0 6 6V${y2 - 6}q0 6 6 6`;
  return [svg("path", { d: `M${x1} ${y1}${y1 === y2 ? "" : corner}H${x2}`, ...attributes })];
}

/** @param {Placed} node */
function box(node) {
  const shape = svg("rect", { x: node.x, y: node.y, width: node.width, height: BOX, rx: 5 });
  const text = svg("text", { x: node.x + node.width / 2, y: node.y + BOX / 2 }, node.label);
  return svg("g", { class: `node ${node.kind}`, "data-node": node.node, "data-depth": node.depth }, shape, text);
}

/** @param {SVGElement} group @param {Step} step */
function explain(group, step) {
  const node = Number(group.dataset.node);
  const { tree } = step;
  const own = step.emitted.at(-1);
  const kind = /** @type {keyof typeof NAMES} */ ([...group.classList].find((name) => name in NAMES) ?? "root");
  const [text, token, p, q] =
    node < 0 || !tree
      ? [own?.text ?? "", own?.token, own?.p, own?.q]
      : [tree.texts[node], tree.tokens[node], tree.p[node], tree.q[node]];
  /** @type {[string, string][]} */
  const facts = [["token", `${visible(text)} (${token})`]];
  if (kind !== "root") {
    facts.push(["depth", group.dataset.depth ?? "–"], ["drafter", tree ? step.drafter : "none"]);
    facts.push(["p (model)", chance(p)], ["q (drafter)", drawn(q, node >= 0)]);
  }
  showTip(group, NAMES[kind], facts, kind);
}
