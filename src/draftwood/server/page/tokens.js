// @ts-check
/** An answer, token by token: how each came, and a way to its step. */

/** @import { Emitted, Step } from "./types.js" */

import { byId, el } from "./dom.js";
import { chance, drawn, visible } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const KINDS = {
  accepted: "accepted guess",
  bonus: "bonus token",
  correction: "correction",
  plain: "plain token",
};

/**
 * What there is to say about a token.
 * @param {Emitted} token
 * @param {Step} step
 * @returns {[string, string][]}
 */
export function facts(token, step) {
  const guessed = step.tree !== null;
  return [
    ["token", `${visible(token.text)} (${token.token})`],
    ["step", String(step.step)],
    ["depth", guessed ? String(token.depth) : "–"],
    ["drafter", guessed ? step.drafter : "none"],
    ["p (model)", chance(token.p)],
    ["q (drafter)", drawn(token.q, token.node !== null)],
  ];
}

/** Text whose tokens can be hovered, walked through with the arrow keys, and picked. */
export class TokenText {
  /**
   * @param {Step[]} steps  The list that is shown, and grows.
   * @param {(steps: Step[], index: number) => void} onPick  Hears of the step a token came from.
   */
  constructor(steps, onPick) {
    this.element = el("div", { class: "tokens", role: "group", tabindex: "0" });
    this.element.setAttribute("aria-label", "Answer");
    this.element.setAttribute("aria-describedby", "answer-keys");
    this.steps = steps;
    /** @type {{span: HTMLElement, token: Emitted, index: number}[]} */
    this.marks = [];
    this.current = -1;
    this.onPick = onPick;
    this.element.addEventListener("pointerover", (event) => this.#point(event.target));
    this.element.addEventListener("pointerleave", () => hideTip(this.element));
    this.element.addEventListener("click", (event) => this.#click(event.target));
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("blur", () => this.#walkTo(-1));
    steps.forEach((step, index) => this.#append(step, index));
  }

  /** Tokens of one more step. @param {Step} step */
  add(step) {
    this.#append(step, this.steps.push(step) - 1);
  }

  /** @param {Step} step @param {number} index */
  #append(step, index) {
    for (const token of step.emitted) {
      const span = el("span", { class: "token", "data-kind": token.kind }, token.text);
      span.dataset.mark = String(this.marks.push({ span, token, index }) - 1);
      this.element.append(span);
    }
  }

  /** Text that nothing is known about. @param {string} text */
  addText(text) {
    this.element.append(text);
  }

  /** @param {EventTarget | null} target */
  #markOf(target) {
    const mark = target instanceof HTMLElement ? target.dataset.mark : undefined;
    return mark === undefined ? -1 : Number(mark);
  }

  /** @param {EventTarget | null} target */
  #point(target) {
    const mark = this.#markOf(target);
    if (mark >= 0) this.#tell(mark);
  }

  /** @param {EventTarget | null} target */
  #click(target) {
    // Somebody who marks text to copy it does not mean the tree.
    if (!getSelection()?.isCollapsed) return;
    const mark = this.#markOf(target);
    if (mark < 0) return;
    this.#walkTo(mark);
    this.#pick(mark);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const last = this.marks.length - 1;
    const places = {
      ArrowRight: Math.min(this.current + 1, last),
      ArrowLeft: this.current < 0 ? last : Math.max(this.current - 1, 0),
      Home: 0,
      End: last,
    };
    if (event.altKey || event.ctrlKey || event.metaKey || last < 0) return;
    if (event.key in places) {
      event.preventDefault();
      this.#walkTo(places[/** @type {keyof typeof places} */ (event.key)]);
    } else if (event.key === "Enter" && this.current >= 0) {
      event.preventDefault();
      this.#pick(this.current);
    }
  }

  /** @param {number} mark  -1 for none. */
  #walkTo(mark) {
    this.marks[this.current]?.span.classList.remove("current");
    this.current = mark;
    if (mark < 0) return hideTip(this.element);
    const { span, token, index } = this.marks[mark];
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    this.#tell(mark);
    const words = facts(token, this.steps[index]).map((fact) => fact.join(" "));
    byId("said").textContent = [KINDS[token.kind], ...words].join(", ");
  }

  /** @param {number} mark */
  #tell(mark) {
    const { span, token, index } = this.marks[mark];
    showTip(span, KINDS[token.kind], facts(token, this.steps[index]), token.kind);
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
    guessed,
    kept,
    perStep: steps.length ? tokens / steps.length : null,
    perSecond: decoding > 0 ? (tokens - steps[0].emitted.length) / decoding : null,
  };
}
