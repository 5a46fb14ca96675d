// @ts-check
/** Markdown on the page, drawn while it grows: elements and text nodes, never HTML from a string. */

/** @import { Block, Span } from "./markdown.js" */

import { copyButton, el } from "./dom.js";
import { Passage, blocks } from "./markdown.js";

const FIRST_LEVEL = 4; // the page's own headings end at 3
const LAST_LEVEL = 6;

/** @typedef {(passage: Passage) => Node[]} Leaves  Draws characters. */

/** Keeps an element up to date with a text that grows: only the last block is ever drawn again. */
export class Formatted {
  /** @param {HTMLElement} element @param {Leaves} [leaves] */
  constructor(element, leaves = (passage) => [document.createTextNode(passage.text)]) {
    this.element = element;
    this.leaves = leaves;
    this.text = "";
    this.drawings = 0;
    this.settled = 0; // where the last block starts
    /** @type {Element | null} */
    this.last = null;
  }

  /** @param {string} text  All of it so far. */
  update(text) {
    if (text === this.text) return;
    this.text = text;
    this.drawings += 1;
    const found = blocks(Passage.of(text.slice(this.settled), this.settled));
    this.last?.remove();
    const drawn = found.map((block) => this.#block(block));
    this.element.append(...drawn);
    this.last = drawn.at(-1) ?? null;
    this.settled = found.at(-1)?.from ?? this.settled;
  }

  /** The text is whole: what looked like the end of a block while it grew may not have been one. @param {string} text */
  finish(text) {
    if (this.drawings === 1 && text === this.text) return;
    this.element.replaceChildren();
    this.last = null;
    this.settled = 0;
    this.text = "";
    this.update(text);
  }

  /** @param {Block} block @returns {HTMLElement} */
  #block(block) {
    switch (block.type) {
      case "heading": {
        const level = /** @type {"h4" | "h5" | "h6"} */ (`h${Math.min(FIRST_LEVEL + block.level - 1, LAST_LEVEL)}`);
        return el(level, {}, ...this.#spans(block.spans));
      }
      case "fence":
        return this.#fence(block.language, block.passage);
      case "list": {
        const items = block.items.map((item) => el("li", {}, ...item.map((inner) => this.#block(inner))));
        return block.ordered ? el("ol", { start: String(block.first) }, ...items) : el("ul", {}, ...items);
      }
      case "quote":
        return el("blockquote", {}, ...block.blocks.map((inner) => this.#block(inner)));
      case "rule":
        return el("hr");
      case "paragraph":
        return el("p", {}, ...this.#spans(block.spans));
    }
  }

  /** @param {string} language @param {Passage} passage */
  #fence(language, passage) {
    const code = el("code", {}, ...this.leaves(passage));
    const name = language.split(/\s/)[0];
    const head = el("figcaption", {}, el("span", {}, name), copyButton("Copy code", () => passage.text, code));
    return el("figure", { class: "code", "aria-label": `Code${name && `: ${name}`}` }, head, el("pre", {}, code));
  }

  /** @param {Span[]} spans @returns {Node[]} */
  #spans(spans) {
    return spans.flatMap((span) => this.#span(span));
  }

  /** @param {Span} span @returns {Node[]} */
  #span(span) {
    switch (span.type) {
      case "text":
        return this.leaves(span.passage);
      case "code":
        return [el("code", {}, ...this.leaves(span.passage))];
      case "link":
        return [link(span.address, this.#spans(span.spans))];
      case "strong":
        return [el("strong", {}, ...this.#spans(span.spans))];
      case "em":
        return [el("em", {}, ...this.#spans(span.spans))];
      case "strike":
        return [el("s", {}, ...this.#spans(span.spans))];
    }
  }
}

/** @param {string} address @param {Node[]} words */
function link(address, words) {
  return el("a", { href: address, title: address, rel: "noopener noreferrer nofollow", target: "_blank" }, ...words);
}
