// @ts-check
/** The same prompt twice: plain and speculative, one after the other or at once. */

/** @import { Asking, Chunk, Law, Message, Step } from "./types.js" */
/** @import { Settings } from "./settings.js" */
/** @import { TreePanel } from "./tree.js" */

import { answer, isAbort, told } from "./api.js";
import { byId, el } from "./dom.js";
import { compared } from "./compare.js";
import { counted, duration, number, percent } from "./format.js";
import { EDIT } from "./samples.js";
import { load, save } from "./store.js";
import { TokenText, figures } from "./tokens.js";

const FRAME = 100; // milliseconds between two looks at a replay

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
    settings.addEventListener("view", () => this.running ?? this.#format());
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
    this.#format();
  }

  /** Not while they run: where browser and engine share a machine, the longer text would be slowed more. */
  #format() {
    this.lanes.forEach((lane) => lane.text.show(this.settings.formatted));
  }

  /** @param {Asking} asking @param {AbortSignal} signal */
  async #run(asking, signal) {
    const { system } = this.settings;
    /** @type {Message[]} */
    const messages = [{ role: "user", content: this.prompt.value }];
    if (system) messages.unshift({ role: "system", content: system });
    this.lanes.forEach((lane) => lane.aim(asking.max_tokens, true));
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
    const first = speculative.figures.seconds < plain.figures.seconds ? speculative : plain;
    this.lanes.forEach((lane) => lane.end(first));
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
    this.prompt.value = kept?.prompt || EDIT;
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
    this.text = new TokenText([], onPick, false);
    this.text.element.setAttribute("aria-label", `${name} answer`);
    this.content = "";
    this.track = el("progress", { max: "1", value: "0", "aria-label": `${name}: how far` });
    this.label = el("p", { class: "hint how-far" }, "Not started.");
    this.most = false;
    const fact = (/** @type {string} */ label) => {
      const value = el("dd", {}, "–");
      return { value, row: el("div", {}, el("dt", {}, label), value) };
    };
    const [time, speed, perStep] = [fact("time"), fact("tokens/s"), fact("tokens per step")];
    this.values = { time: time.value, speed: speed.value, perStep: perStep.value };
    const facts = el("dl", {}, time.row, speed.row, perStep.row);
    this.element = el("article", { class: "lane" }, el("h3", {}, name), this.track, this.label, facts, this.text.element);
  }

  /** From the first token on: before that the prompt was read, which is the same work for both. */
  get figures() {
    const all = figures(this.text.steps);
    return { ...all, seconds: all.decoding };
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

  /** How many tokens make a full bar. @param {number} tokens @param {boolean} [most]  Whether it may be fewer. */
  aim(tokens, most = false) {
    this.track.max = Math.max(1, tokens);
    this.most = most;
  }

  #show() {
    const { seconds, perSecond, perStep, tokens } = this.figures;
    this.values.time.textContent = duration(seconds);
    this.values.speed.textContent = number(perSecond);
    this.values.perStep.textContent = number(perStep, 2);
    this.#mark(tokens, `${duration(seconds)} · ${number(perSecond)} tokens/s`);
  }

  /** @param {number} tokens @param {string} words */
  #mark(tokens, words) {
    const all = Math.max(tokens, this.track.max);
    this.track.value = tokens;
    const share = `${tokens} of ${this.most ? "at most " : ""}${counted(all, "token")} (${percent(tokens / all)})`;
    this.label.textContent = `${share} · ${words}`;
    this.track.setAttribute("aria-valuetext", this.label.textContent);
  }

  /** Tokens it had so long after its first. @param {number} seconds */
  #tokensAt(seconds) {
    let [passed, tokens] = [-(this.text.steps[0]?.seconds ?? 0), 0];
    for (const step of this.text.steps) {
      passed += step.seconds;
      if (passed > seconds + 1e-9) break;
      tokens += step.emitted.length;
    }
    return tokens;
  }

  /** Where it was so long after its first token. @param {number} seconds */
  replay(seconds) {
    this.#mark(this.#tokensAt(seconds), `${duration(Math.min(seconds, this.figures.seconds))} · replayed`);
  }

  /** Both are through: show where this one was when the first had finished. @param {Lane} first */
  end(first) {
    const { tokens, seconds, perSecond } = this.figures;
    const when = first.figures.seconds;
    const whole = `${duration(seconds)} · ${number(perSecond)} tokens/s`;
    this.aim(tokens);
    if (this === first || seconds <= when) return this.#mark(tokens, `${whole} · finished first`);
    this.#mark(this.#tokensAt(when), `when ${first.name} finished at ${duration(when)}; all after ${whole}`);
  }
}

/** Runs a finished lane again beside the one that runs now, so that there is a race to watch. */
class Replay {
  /** @param {Lane} finished @param {Lane} running */
  constructor(finished, running) {
    const { tokens } = finished.figures;
    finished.aim(tokens);
    running.aim(tokens);
    let began = 0;
    this.handle = setInterval(() => {
      if (!running.text.steps.length) return;
      began ||= performance.now();
      finished.replay((performance.now() - began) / 1000);
    }, FRAME);
  }

  end() {
    clearInterval(this.handle);
  }
}

/**
 * Who finished when, by how much, and whether both said the same.
 * @param {Lane[]} lanes @param {Law | undefined} law @param {number} temperature
 */
function verdict([plain, speculative], law, temperature) {
  const same = plain.content === speculative.content;
  const words = same
    ? `The two texts are identical: ${counted(plain.figures.tokens, "token")}.`
    : `The texts differ from character ${firstDifference(plain.content, speculative.content) + 1} on. ${excuse(law, temperature)}`;
  const result = el("strong", {}, judged(plain, speculative));
  return [result, el("span", {}, finishes(plain, speculative)), el("span", { class: same ? "same" : "different" }, words)];
}

/** @param {Lane} plain @param {Lane} speculative */
function judged(plain, speculative) {
  const { result, ratio } = compared(plain.figures, speculative.figures);
  const perStep = number(speculative.figures.perStep, 2);
  switch (result) {
    case "short":
      return "Too short to compare: answers like these do not tell how many times as fast one is. Ask for more tokens.";
    case "unsteady":
      return `The times are not steady enough to say how many times as fast: they differ by more than ${perStep} tokens a step can gain. Was the machine busy?`;
    case "even":
      return `A dead heat, with ${perStep} tokens a step.`;
    case "speculative":
      return `Speculative decoding was ${number(ratio, 2)} times as fast, with ${perStep} tokens a step.`;
    case "plain":
      return `Plain decoding was ${number(ratio, 2)} times as fast: ${perStep} tokens a step did not pay for the guesses.`;
  }
}

/** @param {Lane} plain @param {Lane} speculative */
function finishes(plain, speculative) {
  const order = [plain, speculative].sort((a, b) => a.figures.seconds - b.figures.seconds);
  const [first, second] = order.map((lane) => `${lane.name} finished after ${duration(lane.figures.seconds)}`);
  return `${first}, ${second}.`;
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
