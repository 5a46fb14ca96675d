// @ts-check
/** Small charts: a title, the value now, and a picture. Drawn in SVG, labelled in HTML. */

import { el, svg } from "./dom.js";
import { percent } from "./format.js";

const POINTS = 120; // a minute of events
const HEIGHT = 40;

/** What both kinds share. @param {string} title @param {SVGElement} picture */
function frame(title, picture) {
  const value = el("output", {}, "–");
  const top = el("span", { class: "top" });
  const plot = el("div", { class: "plot" }, picture, top);
  const element = el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, title), value), plot);
  // Figures that change twice a second are nothing to be read out unasked.
  value.setAttribute("aria-live", "off");
  return { element, value, top, plot };
}

/** Values over the last minute. */
export class LineChart {
  /**
   * @param {string} title
   * @param {(value: number | null) => string} format
   * @param {number} [least]  The scale reaches at least this far.
   */
  constructor(title, format, least = 1) {
    this.title = title;
    this.format = format;
    this.least = least;
    /** @type {(number | null)[]} */
    this.values = [];
    this.line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    this.area = svg("path", { class: "area" });
    this.picture = svg("svg", { viewBox: `0 0 ${POINTS - 1} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.picture.append(this.area, this.line);
    const { element, value, top, plot } = frame(title, this.picture);
    this.element = element;
    this.value = value;
    this.top = top;
    this.cursor = el("span", { class: "cursor", hidden: "" });
    plot.append(this.cursor);
    plot.addEventListener("pointermove", (event) => this.#point(event));
    plot.addEventListener("pointerleave", () => this.#leave());
    /** @type {number | null} */
    this.pointed = null;
  }

  /** @param {number | null} value */
  push(value) {
    this.values.push(value);
    if (this.values.length > POINTS) this.values.shift();
    this.#draw();
  }

  #draw() {
    const { values } = this;
    const highest = nice(Math.max(this.least, ...values.map((value) => value ?? 0)));
    const first = POINTS - values.length;
    const y = (/** @type {number} */ value) => (HEIGHT - 1 - (value / highest) * (HEIGHT - 3)).toFixed(2);
    const runs = stretches(values).map((run) => run.map(([i, value]) => `${first + i} ${y(value)}`));
    this.line.setAttribute("d", runs.map((run) => `M${run.join("L")}${run.length === 1 ? "h.5" : ""}`).join(""));
    const closed = (/** @type {string[]} */ run) => {
      const [from, to] = [run[0], run[run.length - 1]].map((point) => point.split(" ")[0]);
      return `M${from} ${HEIGHT}L${run.join("L")}L${to} ${HEIGHT}Z`;
    };
    this.area.setAttribute("d", runs.map(closed).join(""));
    this.top.textContent = this.format(highest);
    this.#tell();
  }

  #tell() {
    const { values, pointed } = this;
    const now = this.format(values.at(-1) ?? null);
    const seen = pointed === null ? now : this.format(values[pointed] ?? null);
    this.value.textContent = seen;
    this.picture.setAttribute("aria-label", `${this.title}: ${now}`);
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const box = this.picture.getBoundingClientRect();
    const share = Math.max(0, Math.min((event.clientX - box.left) / box.width, 1));
    const place = Math.round(share * (POINTS - 1)) - (POINTS - this.values.length);
    this.pointed = place >= 0 ? place : null;
    this.cursor.hidden = this.pointed === null;
    this.cursor.style.left = `${100 * share}%`;
    this.#tell();
  }

  #leave() {
    this.pointed = null;
    this.cursor.hidden = true;
    this.#tell();
  }
}

/** Shares between 0 and 1, side by side. */
export class BarChart {
  /** @param {string} title */
  constructor(title) {
    this.title = title;
    this.picture = svg("svg", { role: "img" });
    const { element, value } = frame(title, this.picture);
    element.classList.add("bars");
    value.remove(); // every bar has its own
    this.element = element;
  }

  /** @param {number[]} shares */
  set(shares) {
    const width = 100 / Math.max(shares.length, 4);
    this.picture.replaceChildren(...shares.flatMap((share, i) => bar(share, i, width)));
    const words = shares.map((share, i) => `depth ${i + 1} ${percent(share)}`);
    this.picture.setAttribute("aria-label", `${this.title}: ${words.join("; ") || "none yet"}`);
  }
}

/**
 * A bar between its depth below and its value above; lengths in per cent.
 * @param {number} share @param {number} i @param {number} width
 */
function bar(share, i, width) {
  const middle = `${(i + 0.5) * width}%`;
  const [top, height] = [78 - 58 * share, 58 * share];
  const [x, y] = [`${(i + 0.15) * width}%`, `${top}%`];
  const shape = svg("rect", { class: "bar", x, y, width: `${0.7 * width}%`, height: `${height}%`, rx: 2 });
  const value = svg("text", { x: middle, y: `${top - 4}%` }, (100 * share).toFixed(0));
  return [shape, value, svg("text", { class: "depth", x: middle, y: "97%" }, String(i + 1))];
}

/** Runs of values that are there. @param {(number | null)[]} values */
function stretches(values) {
  /** @type {[number, number][][]} */
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i > 0 && values[i - 1] !== null && found.length) found[found.length - 1].push([i, value]);
    else found.push([[i, value]]);
  });
  return found;
}

/** The next round number: 1, 2, 3, 4, 5, 6, 8 or 10 times a power of ten. @param {number} value */
export function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const steps = [1, 2, 3, 4, 5, 6, 8, 10];
  return (steps.find((step) => step * power >= value * 0.999) ?? 10) * power;
}
