// @ts-check
/** The conversation: asking, streaming, stopping, and keeping it over a reload. */

/** @import { Message, Step } from "./types.js" */
/** @import { Settings } from "./settings.js" */
/** @import { TreePanel } from "./tree.js" */

import { answer, isAbort, told } from "./api.js";
import { button, byId, copyButton, el } from "./dom.js";
import { counted, duration, number } from "./format.js";
import { Formatted } from "./formatted.js";
import { SAMPLES } from "./samples.js";
import { load, save } from "./store.js";
import { TokenText, figures } from "./tokens.js";

const ROOM = 2_000_000; // characters of steps that are kept; browsers give about five million in all
const NEAR = 40; // pixels from the end that still count as reading along

/**
 * @typedef {object} Turn
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {Step[]} steps
 * @property {string} note  Why the answer ended where it did, if that is worth a word.
 * @property {string} error  What the server said.
 */

const NOTES = /** @type {Record<string, string>} */ ({ length: "ended by the limit on tokens" });

export class Chat {
  /** @param {Settings} settings @param {TreePanel} tree */
  constructor(settings, tree) {
    this.settings = settings;
    this.tree = tree;
    this.model = "";
    this.list = byId("messages");
    this.message = /** @type {HTMLTextAreaElement} */ (byId("message"));
    /** @type {AbortController | null} */
    this.asking = null;
    /** @type {Turn[]} */
    this.turns = (load("conversation") ?? []).filter(isTurn);
    /** @type {Article[]} */
    this.articles = [];
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.message.addEventListener("keydown", (event) => this.#key(event));
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    settings.addEventListener("view", () => this.articles.forEach((article) => article.show(settings.formatted)));
    addEventListener("pagehide", () => {
      this.stop();
      this.#keep();
    });
    this.#render();
  }

  /** Say what is in the box. */
  send() {
    const content = this.message.value.trim();
    if (!content || this.asking || !this.settings.check()) return;
    this.message.value = "";
    this.#add({ role: "user", content, steps: [], note: "", error: "" });
    this.#ask();
  }

  /** Hang up; what came stays. */
  stop() {
    this.asking?.abort();
  }

  /** Begin anew. */
  clear() {
    this.stop();
    this.turns = [];
    this.tree.clear();
    this.#render();
    this.#keep();
    this.message.focus();
  }

  /** Another answer to the same question. */
  again() {
    if (this.asking || !this.settings.check()) return;
    if (this.turns.at(-1)?.role === "assistant") this.turns.pop();
    this.#render();
    this.message.focus();
    this.#ask();
  }

  async #ask() {
    const asking = new AbortController();
    const messages = this.#messages();
    const turn = /** @type {Turn} */ ({ role: "assistant", content: "", steps: [], note: "", error: "" });
    const article = this.#add(turn);
    this.#busy(asking);
    byId("said").textContent = "Answering.";
    try {
      for await (const chunk of answer(this.model, messages, this.settings.asking(), asking.signal)) {
        turn.content += chunk.choices[0]?.delta.content ?? "";
        turn.note = NOTES[chunk.choices[0]?.finish_reason ?? ""] ?? turn.note;
        if (chunk.trace?.length) this.#grow(article, chunk.trace);
      }
    } catch (error) {
      if (isAbort(error)) turn.note = "stopped";
      else turn.error = told(error);
    }
    this.#done(article, asking);
  }

  /** @returns {Message[]} */
  #messages() {
    const said = this.turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
    const { system } = this.settings;
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  /** @param {Article} article @param {Step[]} steps */
  #grow(article, steps) {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    steps.forEach((step) => article.add(step));
    this.tree.grown(article.turn.steps);
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.list.scrollTop = this.list.scrollHeight;
  }

  /** @param {Article} article @param {AbortController} asking */
  #done(article, asking) {
    // The conversation was cleared meanwhile: drop the answer.
    if (this.asking === asking) this.#busy(null);
    if (!this.turns.includes(article.turn)) return;
    const { content, note, error } = article.turn;
    byId("said").textContent = error || `Answer${note && ` (${note})`}: ${content}`;
    article.close();
    this.#lastMayGoAgain();
    this.list.scrollTop = this.list.scrollHeight;
    this.#keep();
  }

  /** @param {AbortController | null} asking */
  #busy(asking) {
    const focused = document.activeElement;
    this.asking = asking;
    byId("send").hidden = asking !== null;
    byId("stop").hidden = asking === null;
    // A button that vanishes must not take the focus with it.
    if (focused === byId("send") || focused === byId("stop")) this.message.focus();
  }

  #render() {
    this.articles = this.turns.map((turn) => new Article(turn, this));
    this.list.replaceChildren(...this.articles.map((article) => article.element));
    this.articles.forEach((article) => article.close());
    this.#empty();
    this.#lastMayGoAgain();
    const last = this.turns.findLast((turn) => turn.steps.length);
    if (last) this.tree.grown(last.steps);
    this.list.scrollTop = this.list.scrollHeight;
  }

  /** @param {Turn} turn */
  #add(turn) {
    const article = new Article(turn, this);
    this.turns.push(turn);
    this.articles.push(article);
    this.#empty();
    this.list.append(article.element);
    this.#lastMayGoAgain();
    this.list.scrollTop = this.list.scrollHeight;
    return article;
  }

  #empty() {
    this.list.querySelector(".empty")?.remove();
    if (this.turns.length) return;
    const words = "Nothing said yet. Answers show how each token came; point at one to see its chances, click it to see its tree.";
    const samples = SAMPLES.map((sample) => el("li", {}, button(sample.label, () => this.#say(sample.prompt)), el("p", { class: "hint" }, sample.hint)));
    const list = el("ul", { class: "samples", "aria-label": "Prompts to start with" }, ...samples);
    this.list.append(el("li", { class: "empty" }, el("p", {}, words), list));
  }

  /** @param {string} prompt */
  #say(prompt) {
    this.message.value = prompt;
    this.message.focus();
    this.send();
  }

  #lastMayGoAgain() {
    this.articles.forEach((article, i, all) => article.mayGoAgain(i === all.length - 1 && !this.asking));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  #keep() {
    if (!save("conversation", trimmed(this.turns, ROOM))) save("conversation", trimmed(this.turns, 0));
  }
}

/** One turn on the page. */
class Article {
  /** @param {Turn} turn @param {Chat} chat */
  constructor(turn, chat) {
    this.turn = turn;
    this.chat = chat;
    const { formatted } = chat.settings;
    this.text = new TokenText(turn.steps, (steps, index) => chat.tree.pick(steps, index), formatted);
    this.foot = el("p", { class: "hint figures" });
    this.actions = el("div", { class: "actions" });
    this.againButton = button("Regenerate", () => chat.again());
    const mine = turn.role === "user";
    this.body = mine ? el("div", { class: "tokens" }) : this.text.element;
    this.element = el("li", { class: `turn ${turn.role}` }, el("h3", {}, mine ? "You" : "Answer"), this.body);
    if (mine) this.show(formatted);
    if (!mine) this.element.setAttribute("aria-busy", "true");
    this.element.append(el("footer", {}, this.foot, this.actions));
    if (!turn.steps.length) this.text.addText(turn.content); // kept without its steps
  }

  /** @param {boolean} formatted */
  show(formatted) {
    if (this.turn.role === "assistant") return this.text.show(formatted);
    this.body.classList.toggle("formatted", formatted);
    this.body.replaceChildren(formatted ? "" : this.turn.content);
    if (formatted) new Formatted(this.body).update(this.turn.content);
  }

  /** @param {Step} step */
  add(step) {
    this.text.add(step);
    this.foot.textContent = summary(this.turn);
  }

  /** The turn is over. */
  close() {
    this.element.removeAttribute("aria-busy");
    if (this.turn.role === "user") return;
    this.text.finish();
    this.foot.textContent = summary(this.turn);
    if (this.turn.error) this.foot.before(el("p", { class: "error", role: "alert" }, this.turn.error));
    if (this.turn.content) this.actions.append(copyButton("Copy", () => this.turn.content, this.text.element));
    this.againButton.textContent = this.turn.error ? "Try again" : "Regenerate";
  }

  /** @param {boolean} may */
  mayGoAgain(may) {
    const unanswered = this.turn.role === "user";
    if (unanswered) this.againButton.textContent = "Answer";
    if (may) this.actions.append(this.againButton);
    else this.againButton.remove();
  }
}

/** An answer in figures. @param {Turn} turn */
function summary({ steps, note }) {
  if (!steps.length) return note;
  const { tokens, seconds, guessed, kept, perStep, perSecond } = figures(steps);
  const parts = [counted(tokens, "token"), duration(seconds), `${number(perSecond)} tokens/s`];
  parts.push(`${number(perStep, 2)} a step`, guessed ? `${kept} of ${counted(guessed, "guess", "guesses")} kept` : "nothing guessed");
  return [...parts, ...(note ? [note] : [])].join(" · ");
}

/** The newest steps that fit; without steps an answer is plain text after a reload. @param {Turn[]} turns @param {number} room */
function trimmed(turns, room) {
  return turns
    .toReversed()
    .map((turn) => {
      room -= turn.steps.length && JSON.stringify(turn.steps).length;
      return room < 0 ? { ...turn, steps: [] } : turn;
    })
    .toReversed();
}

/** @param {any} turn @returns {turn is Turn} */
function isTurn(turn) {
  return (turn?.role === "user" || turn?.role === "assistant") && typeof turn.content === "string" && Array.isArray(turn.steps);
}
