// @ts-check
/** What the server does right now: an event every half second, while the page is visible. */

/** @import { LastStep, Live } from "./types.js" */

import { BarChart, LineChart } from "./charts.js";
import { byId } from "./dom.js";
import { counted, duration, number, percent } from "./format.js";

const AGAIN = 5000; // milliseconds before a refused connection is tried again

const REMEMBERED = 120; // steps: a minute of events

const whole = (/** @type {number | null} */ value) => number(value, 0);

/** Opens the stream, draws what comes, and says how the server is. */
export class LivePanel {
  constructor() {
    this.speed = new LineChart("Tokens/s", (value) => number(value, value !== null && value >= 100 ? 0 : 1), 10);
    this.perStep = new LineChart("Tokens per step", (value) => number(value, 2), 2);
    this.depths = new BarChart("Acceptance by depth, %");
    this.budget = new LineChart("Guesses a step, at most", whole, 4);
    this.batch = new LineChart("Batch", whole, 2);
    this.queue = new LineChart("Queue", whole, 2);
    this.memory = new LineChart("KV use", percent, 0.1);
    const charts = [this.speed, this.perStep, this.depths, this.batch, this.queue, this.memory];
    byId("charts").append(...charts.map((chart) => chart.element));
    byId("controller").append(this.budget.element);
    this.costs = new Costs();
    /** @type {EventSource | null} */
    this.source = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    this.open();
  }

  open() {
    if (this.source || document.hidden) return;
    const source = new EventSource("live?every=0.5");
    this.source = source;
    source.addEventListener("message", (event) => this.#show(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      state("unreachable");
      // The browser tries again by itself unless it was refused.
      if (source.readyState !== EventSource.CLOSED || this.source !== source) return;
      this.source = null;
      setTimeout(() => this.open(), AGAIN);
    });
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  /** @param {Live} live */
  #show(live) {
    state(live.status);
    this.speed.push(live.tokens_per_second ?? 0);
    this.perStep.push(live.tokens_per_step);
    this.depths.set(live.acceptance_by_depth);
    this.budget.push(live.controller?.nodes ?? null);
    this.batch.push(live.running);
    this.queue.push(live.waiting);
    this.memory.push(live.kv_use);
    decision(live.controller);
    this.costs.show(live.last_step);
  }
}

/** What the controller expected of steps, beside what they took. */
class Costs {
  constructor() {
    this.measured = NaN; // of the last step
    /** Measured by predicted, of steps in the last minute. @type {number[]} */
    this.ratios = [];
  }

  /** @param {LastStep | null} step */
  show(step) {
    if (!step || step.measured_seconds === this.measured) return;
    this.measured = step.measured_seconds;
    const { predicted_seconds: predicted, measured_seconds: measured } = step;
    if (predicted) this.ratios = [...this.ratios.slice(1 - REMEMBERED), measured / predicted];
    byId("cost-predicted").textContent = predicted ? duration(predicted, 1) : "–";
    byId("cost-measured").textContent = duration(measured, 1);
    byId("cost-words").textContent = `${counted(step.rows, "row")}, ${counted(step.sequences, "answer")}. ${this.#judged(predicted)}`;
  }

  /** @param {number | null} predicted */
  #judged(predicted) {
    if (!predicted) return "No prediction without a cost table: run draftwood calibrate.";
    const middle = this.ratios.toSorted((a, b) => a - b)[this.ratios.length >> 1];
    return `Lately ${number(middle, 2)} times the prediction (median of ${counted(this.ratios.length, "step")}).`;
  }
}

/** @param {string} word */
function state(word) {
  const status = byId("status");
  if (status.textContent === word) return; // it is read out when it changes
  status.textContent = word;
  status.dataset.state = word;
}

/** @param {Live["controller"]} controller */
function decision(controller) {
  byId("controller-name").textContent = controller?.name ?? "";
  byId("controller-choice").textContent = controller ? choice(controller) : "Nothing was decided yet.";
  byId("controller-why").textContent = controller ? controller.why + gained(controller) : "";
}

/** @param {NonNullable<Live["controller"]>} controller */
function gained({ expected_gain, measured_gain }) {
  const times = (/** @type {number | null} */ gain, /** @type {string} */ how) =>
    gain === null ? "" : ` ${how} ${gain.toFixed(2)} times as fast as without guesses.`;
  return times(expected_gain, "; expected") + times(measured_gain, "Measured");
}

/** @param {NonNullable<Live["controller"]>} controller */
function choice({ nodes, depth }) {
  if (nodes === 0) return "No guesses.";
  const most = nodes === null ? "As many guesses as the drafter makes" : `At most ${counted(nodes, "guess", "guesses")} a step`;
  return depth === null ? `${most}.` : `${most}, ${depth} deep.`;
}
