// @ts-check
/** An answer, token by token: how each came, and a way to its step. */

/** @import { Passage } from "./markdown.js" */
/** @import { Emitted, Step } from "./types.js" */

import { byId, el, throttled } from "./dom.js";
import { chance, drawn, visible } from "./format.js";
import { Formatted } from "./formatted.js";
import { rejectedBefore, rejectedWords } from "./rejected.js";
import { hideTip, showTip } from "./tip.js";

const CALM = 100; // milliseconds between two drawings of a text that is formatted

const KINDS = {
  accepted: "accepted guess",
  bonus: "bonus token",
  correction: "correction",
  plain: "plain token",
};

/**
 * @typedef {object} Mark  A token of the answer.
 * @property {Emitted} token
 * @property {number} index  Its step's.
 * @property {number} start  Where it starts in the text.
 * @property {string} rejected  What was guessed in its place and not kept.
 */

/**
 * What there is to say about a token.
 * @param {Mark} mark
 * @param {Step} step
 * @returns {[string, string][]}
 */
export function facts({ token, rejected }, step) {
  const guessed = step.tree !== null;
  /** @type {[string, string][]} */
  const instead = rejected ? [["rejected here", rejected]] : [];
  return [
    ["token", `${visible(token.text)} (${token.token})`],
    ["step", String(step.step)],
    ["depth", guessed ? String(token.depth) : "–"],
    ["drafter", guessed ? step.drafter : "none"],
    ["p (model)", chance(token.p)],
    ["q (drafter)", drawn(token.q, token.node !== null)],
    ...instead,
  ];
}

/**
 * Text whose tokens can be hovered, walked through with the arrow keys, and picked: as it came, or formatted as Markdown.
 * Formatted text has no place for tokens that are nothing but marks of the format.
 */
export class TokenText {
  /**
   * @param {Step[]} steps  The list that is shown, and grows.
   * @param {(steps: Step[], index: number) => void} onPick  Hears of the step a token came from.
   * @param {boolean} formatted
   */
  constructor(steps, onPick, formatted) {
    this.element = el("div", { class: "tokens", role: "group", tabindex: "0" });
    this.element.setAttribute("aria-label", "Answer");
    this.element.setAttribute("aria-describedby", "answer-keys");
    this.steps = steps;
    this.text = "";
    /** @type {Mark[]} */
    this.marks = [];
    /** @type {Formatted | null} */
    this.formatted = null;
    this.redraw = throttled(CALM, () => this.formatted?.update(this.text));
    this.current = -1;
    this.onPick = onPick;
    this.element.addEventListener("pointerover", (event) => this.#point(event.target));
    this.element.addEventListener("pointerleave", () => hideTip(this.element));
    this.element.addEventListener("click", (event) => this.#click(event.target));
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("blur", () => this.#walkTo(-1));
    steps.forEach((step, index) => this.#learn(step, index));
    this.show(formatted);
  }

  /** @param {boolean} formatted */
  show(formatted) {
    this.#walkTo(-1);
    this.element.replaceChildren();
    this.element.classList.toggle("formatted", formatted);
    this.formatted = formatted ? new Formatted(this.element, (passage) => this.#leaves(passage)) : null;
    if (this.formatted) this.formatted.update(this.text);
    else this.#append(0);
  }

  /** Tokens of one more step. @param {Step} step */
  add(step) {
    const first = this.marks.length;
    this.#learn(step, this.steps.push(step) - 1);
    if (this.formatted) this.redraw();
    else this.#append(first);
  }

  /** Text that nothing is known about. @param {string} text */
  addText(text) {
    this.text += text;
    if (this.formatted) this.formatted.update(this.text);
    else this.element.append(text);
  }

  /** Nothing more will come. */
  finish() {
    this.formatted?.finish(this.text);
  }

  /** @param {Step} step @param {number} index */
  #learn(step, index) {
    const rejected = rejectedBefore(step).map(rejectedWords);
    step.emitted.forEach((token, i) => {
      this.marks.push({ token, index, start: this.text.length, rejected: rejected[i] });
      this.text += token.text;
    });
  }

  /** Draw tokens as they came. @param {number} first */
  #append(first) {
    const spans = this.marks.slice(first).map(({ token }, i) => this.#span(first + i, token.text, true));
    this.element.append(...spans);
    if (!this.marks.length) this.element.append(this.text);
  }

  /** @param {number} mark @param {string} text @param {boolean} whole  Or at least from its start on. */
  #span(mark, text, whole) {
    const { token, rejected } = this.marks[mark];
    const span = el("span", { class: "token", "data-kind": token.kind, "data-mark": String(mark) }, text);
    if (whole && rejected) span.dataset.rejected = rejected;
    return span;
  }

  /** Characters of formatted text, as pieces of the tokens they came from. @param {Passage} passage @returns {Node[]} */
  #leaves({ text, places }) {
    if (!this.marks.length) return [document.createTextNode(text)];
    const pieces = [];
    for (let from = 0; from < text.length; ) {
      const mark = this.#markAt(places[from]);
      const { start, token } = this.marks[mark];
      let to = from + 1;
      while (to < text.length && places[to] === places[to - 1] + 1 && places[to] < start + token.text.length) to += 1;
      pieces.push(this.#span(mark, text.slice(from, to), places[from] === start));
      from = to;
    }
    return pieces;
  }

  /** The token that a character of the text belongs to. @param {number} place */
  #markAt(place) {
    let [low, high] = [0, this.marks.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.marks[middle].start <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Where a token is drawn: nowhere, or in one piece or more. @param {number} mark @returns {NodeListOf<HTMLElement>} */
  #pieces(mark) {
    return this.element.querySelectorAll(`[data-mark="${mark}"]`);
  }

  /** The next token that is drawn, or the same. @param {number} from @param {1 | -1} by */
  #next(from, by) {
    for (let mark = from; mark >= 0 && mark < this.marks.length; mark += by) if (this.#pieces(mark).length) return mark;
    return this.current;
  }

  /** @param {EventTarget | null} target */
  #markOf(target) {
    const mark = target instanceof HTMLElement ? target.dataset.mark : undefined;
    return mark === undefined ? -1 : Number(mark);
  }

  /** @param {EventTarget | null} target */
  #point(target) {
    const mark = this.#markOf(target);
    if (mark >= 0) this.#tell(mark, /** @type {HTMLElement} */ (target));
  }

  /** @param {EventTarget | null} target */
  #click(target) {
    // A selection made for copying is not a click on the tree.
    if (!getSelection()?.isCollapsed || (target instanceof Element && target.closest("a, button"))) return;
    const mark = this.#markOf(target);
    if (mark < 0) return;
    this.#walkTo(mark);
    this.#pick(mark);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const last = this.marks.length - 1;
    const places = {
      ArrowRight: () => this.#next(this.current + 1, 1),
      ArrowLeft: () => this.#next(this.current < 0 ? last : this.current - 1, -1),
      Home: () => this.#next(0, 1),
      End: () => this.#next(last, -1),
    };
    // Keys of a link or a button inside are their own.
    if (event.target !== this.element || event.altKey || event.ctrlKey || event.metaKey || last < 0) return;
    if (event.key in places) {
      event.preventDefault();
      this.#walkTo(places[/** @type {keyof typeof places} */ (event.key)]());
    } else if (event.key === "Enter" && this.current >= 0) {
      event.preventDefault();
      this.#pick(this.current);
    }
  }

  /** @param {number} mark  -1 for none. */
  #walkTo(mark) {
    this.element.querySelectorAll(".current").forEach((piece) => piece.classList.remove("current"));
    this.current = mark;
    if (mark < 0) return hideTip(this.element);
    const [first, ...others] = this.#pieces(mark);
    [first, ...others].forEach((piece) => piece.classList.add("current"));
    first.scrollIntoView({ block: "nearest" });
    this.#tell(mark, first);
    const { token, index } = this.marks[mark];
    const words = facts(this.marks[mark], this.steps[index]).map((fact) => fact.join(" "));
    byId("said").textContent = [KINDS[token.kind], ...words].join(", ");
  }

  /** @param {number} mark @param {HTMLElement} piece */
  #tell(mark, piece) {
    const { token, index } = this.marks[mark];
    showTip(piece, KINDS[token.kind], facts(this.marks[mark], this.steps[index]), token.kind);
  }

  /** @param {number} mark */
  #pick(mark) {
    this.onPick(this.steps, this.marks[mark].index);
  }
}

/**
 * What a list of steps came to. Speed counts from the first token on; before that the prompt was read.
 * @param {Step[]} steps
 */
export function figures(steps) {
  const tokens = steps.reduce((sum, step) => sum + step.emitted.length, 0);
  const seconds = steps.reduce((sum, step) => sum + step.seconds, 0);
  const guessed = steps.reduce((sum, step) => sum + (step.tree ? step.tree.tokens.length - 1 : 0), 0);
  const kept = steps.reduce((sum, step) => sum + step.emitted.filter((token) => token.kind === "accepted").length, 0);
  const decoding = seconds - (steps[0]?.seconds ?? 0);
  return {
    tokens,
    seconds,
    decoding,
    guessed,
    kept,
    perStep: steps.length ? tokens / steps.length : null,
    perSecond: decoding > 0 ? (tokens - steps[0].emitted.length) / decoding : null,
  };
}
