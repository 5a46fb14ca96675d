// @ts-check
/** The same prompt twice: plain and speculative, one after the other or at once. */

/** @import { Asking, Chunk, Law, Message, Step } from "./types.js" */
/** @import { Settings } from "./settings.js" */
/** @import { TreePanel } from "./tree.js" */

import { answer, isAbort, told } from "./api.js";
import { byId, el } from "./dom.js";
import { counted, duration, number } from "./format.js";
import { load, save } from "./store.js";
import { TokenText, figures } from "./tokens.js";

const PROMPT = `Rename the class Basket to Cart. Print the whole code again.

class Basket:
    def __init__(self):
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)`;

const FRAME = 100; // milliseconds between two looks at a replay
const CLOSE = 1.02; // times as fast that are nobody's victory

export class Race {
  /** @param {Settings} settings @param {TreePanel} tree */
  constructor(settings, tree) {
    this.settings = settings;
    this.tree = tree;
    this.model = "";
    this.form = /** @type {HTMLFormElement} */ (byId("race-form"));
    this.prompt = /** @type {HTMLTextAreaElement} */ (byId("race-prompt"));
    this.verdict = byId("verdict");
    this.error = byId("race-error");
    /** @type {AbortController | null} */
    this.running = null;
    /** @type {Lane[]} */
    this.lanes = [];
    this.#restore(load("race"));
    this.#line();
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    this.form.addEventListener("input", () => save("race", { prompt: this.prompt.value, order: this.#order() }));
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.start();
    });
    byId("race-stop").addEventListener("click", () => this.stop());
  }

  /** Hang up on both; what came stays. */
  stop() {
    this.running?.abort();
  }

  async start() {
    if (this.running || !this.form.reportValidity() || !this.settings.check()) return;
    const running = new AbortController();
    const asking = this.settings.asking();
    const law = this.settings.law;
    this.#busy(running);
    this.#line();
    this.verdict.replaceChildren();
    this.error.hidden = true;
    try {
      await this.#run(asking, running.signal);
      this.verdict.replaceChildren(...verdict(this.lanes, law, asking.temperature));
    } catch (error) {
      // One lane that fails ends the other.
      running.abort();
      this.error.hidden = isAbort(error);
      this.error.textContent = isAbort(error) ? "" : told(error);
      if (isAbort(error)) this.verdict.textContent = "Stopped.";
    }
    this.#busy(null);
  }

  /** @param {Asking} asking @param {AbortSignal} signal */
  async #run(asking, signal) {
    const { system } = this.settings;
    /** @type {Message[]} */
    const messages = [{ role: "user", content: this.prompt.value }];
    if (system) messages.unshift({ role: "system", content: system });
    this.lanes.forEach((lane) => (lane.track.max = asking.max_tokens));
    const ask = (/** @type {Partial<Asking>} */ changes) => answer(this.model, messages, { ...asking, ...changes }, signal);
    // The prompt is in the cache now, for both.
    for await (const _ of ask({ max_tokens: 1 }));
    const [plain, speculative] = this.lanes;
    const runs = [
      () => plain.run(ask({ speculation: { enabled: false } })),
      () => speculative.run(ask({})),
    ];
    if (this.#order() === "parallel") await Promise.all(runs.map((run) => run()));
    else {
      await runs[0]();
      const replay = new Replay(plain, speculative);
      await runs[1]().finally(() => replay.end());
    }
    const finish = Math.min(...this.lanes.map((lane) => lane.seconds));
    this.lanes.forEach((lane) => lane.showAt(finish));
    // Not before: where browser and engine share a machine, drawing trees would slow one lane only.
    this.tree.grown(speculative.text.steps);
  }

  #line() {
    const pick = (/** @type {Step[]} */ steps, /** @type {number} */ index) => this.tree.pick(steps, index);
    this.lanes = [new Lane("Plain", pick), new Lane("Speculative", pick)];
    byId("lanes").replaceChildren(...this.lanes.map((lane) => lane.element));
  }

  /** @param {AbortController | null} running */
  #busy(running) {
    const focused = document.activeElement;
    this.running = running;
    const [start, stop] = [byId("race-start"), byId("race-stop")];
    start.hidden = running !== null;
    stop.hidden = running === null;
    if (focused === start) stop.focus();
    if (focused === stop) start.focus();
  }

  #order() {
    return String(new FormData(this.form).get("order"));
  }

  /** @param {{prompt?: string, order?: string} | null} kept */
  #restore(kept) {
    this.prompt.value = kept?.prompt || PROMPT;
    if (kept?.order !== "parallel") return;
    const choice = /** @type {HTMLInputElement | null} */ (this.form.querySelector("[value=parallel]"));
    if (choice) choice.checked = true;
  }
}

/** One runner. */
class Lane {
  /** @param {string} name @param {(steps: Step[], index: number) => void} onPick */
  constructor(name, onPick) {
    this.name = name;
    this.text = new TokenText([], onPick);
    this.text.element.setAttribute("aria-label", `${name} answer`);
    this.content = "";
    this.track = el("progress", { max: "1", value: "0", "aria-label": `${name}: how far` });
    const fact = (/** @type {string} */ label) => {
      const value = el("dd", {}, "–");
      return { value, row: el("div", {}, el("dt", {}, label), value) };
    };
    const [time, speed, perStep] = [fact("time"), fact("tokens/s"), fact("tokens per step")];
    this.values = { time: time.value, speed: speed.value, perStep: perStep.value };
    const facts = el("dl", {}, time.row, speed.row, perStep.row);
    this.element = el("article", { class: "lane" }, el("h3", {}, name), this.track, facts, this.text.element);
  }

  get seconds() {
    return figures(this.text.steps).seconds;
  }

  get tokens() {
    return figures(this.text.steps).tokens;
  }

  /** @param {AsyncGenerator<Chunk>} chunks */
  async run(chunks) {
    this.element.classList.add("running");
    try {
      for await (const chunk of chunks) {
        this.content += chunk.choices[0]?.delta.content ?? "";
        for (const step of chunk.trace ?? []) this.text.add(step);
        if (chunk.trace?.length) this.#show();
      }
    } finally {
      this.element.classList.remove("running");
    }
  }

  #show() {
    const { seconds, perSecond, perStep, tokens } = figures(this.text.steps);
    this.values.time.textContent = duration(seconds);
    this.values.speed.textContent = number(perSecond);
    this.values.perStep.textContent = number(perStep, 2);
    this.track.value = tokens;
  }

  /** Where it was so long after the start. @param {number} seconds */
  showAt(seconds) {
    let [passed, tokens] = [0, 0];
    for (const step of this.text.steps) {
      passed += step.seconds;
      if (passed > seconds + 1e-9) break;
      tokens += step.emitted.length;
    }
    this.track.max = Math.max(1, this.tokens);
    this.track.value = tokens;
  }
}

/** Runs a finished lane again beside the one that runs now, so that there is a race to watch. */
class Replay {
  /** @param {Lane} finished @param {Lane} running */
  constructor(finished, running) {
    const began = performance.now();
    running.track.max = Math.max(1, finished.tokens);
    this.handle = setInterval(() => finished.showAt((performance.now() - began) / 1000), FRAME);
  }

  end() {
    clearInterval(this.handle);
  }
}

/**
 * Who won, by how much, and whether both said the same.
 * @param {Lane[]} lanes @param {Law | undefined} law @param {number} temperature
 */
function verdict(lanes, law, temperature) {
  const [plain, speculative] = lanes;
  const ratio = plain.seconds / speculative.seconds;
  const [winner, loser, by] = ratio >= 1 ? [speculative, plain, ratio] : [plain, speculative, 1 / ratio];
  const times = `${duration(winner.seconds)} against ${duration(loser.seconds)}`;
  const result = by < CLOSE ? `A dead heat: ${times}.` : `${winner.name} decoding was ${number(by, 2)} times as fast: ${times}.`;
  const same = plain.content === speculative.content;
  const words = same
    ? `The two texts are identical: ${counted(plain.tokens, "token")}.`
    : `The texts differ from character ${firstDifference(plain.content, speculative.content) + 1} on. ${excuse(law, temperature)}`;
  return [el("strong", {}, result), el("span", { class: same ? "same" : "different" }, words)];
}

/** @param {Law | undefined} law @param {number} temperature */
function excuse(law, temperature) {
  if (law && !law.lossless) return `The law ${law.name} is not lossless.`;
  if (law && law.name !== "match" && temperature > 0) {
    return `The law ${law.name} keeps the distribution, not the tokens; match keeps both.`;
  }
  return "With this law and seed that should not be.";
}

/** @param {string} a @param {string} b */
function firstDifference(a, b) {
  let i = 0;
  while (i < a.length && a[i] === b[i]) i += 1;
  return i;
}
