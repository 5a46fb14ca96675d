// @ts-check
/** What every request of the page has in common, as the form says. */

/** @import { Asking, Law, ModelCard, Wishes } from "./types.js" */

import { byId, el } from "./dom.js";
import { load, save } from "./store.js";
import { showView } from "./views.js";

const RANDOM_SEEDS = 2 ** 31;

/** The form, its memory, and what it means for a request. Tells of every "change", and of those of the "view". */
export class Settings extends EventTarget {
  constructor() {
    super();
    this.form = /** @type {HTMLFormElement} */ (byId("settings"));
    /** @type {Law[]} */
    this.laws = [];
    this.defaultLaw = "";
    this.defaultDrafter = "";
    /** Drafters whose trees have branches. @type {string[]} */
    this.branching = [];
    this.form.addEventListener("input", () => this.#changed());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    // A reset form has its defaults only after the event.
    this.form.addEventListener("reset", () => setTimeout(() => this.#changed()));
    this.#restore(load("settings") ?? {});
    this.formatted = this.#field("formatted").checked;
    this.#show();
  }

  /** What this server offers. @param {ModelCard} card */
  offer(card) {
    this.laws = card.laws ?? [];
    this.defaultLaw = card.law;
    this.defaultDrafter = card.drafter;
    this.branching = card.branching ?? [];
    const drafters = card.drafters.map((name) => pair(name, name === "none" ? "none (plain decoding)" : name));
    this.#field("drafter").replaceChildren(...options([["", `default (${card.drafter})`], ...drafters]));
    this.#field("law").replaceChildren(...options([["", `auto (${card.law})`]]), ...lawGroups(this.laws));
    if (card.max_nodes) this.#field("max_nodes").setAttribute("max", String(card.max_nodes));
    if (card.max_model_len) this.#field("max_tokens").setAttribute("max", String(card.max_model_len));
    // What was remembered may only now have an option.
    this.#restore(load("settings") ?? {});
    this.#show();
  }

  /** Whether the form makes sense; the browser shows what does not. */
  check() {
    if (this.form.checkValidity()) return true;
    showView("settings");
    return this.form.reportValidity();
  }

  /** The drafter that requests will get. */
  get drafter() {
    return this.#field("drafter").value || this.defaultDrafter;
  }

  /** Set a field of the form, as a user would. @param {string} name @param {string} value */
  use(name, value) {
    this.#field(name).value = value;
    this.#changed();
  }

  get system() {
    return this.#field("system").value.trim();
  }

  /** The law that requests will get. */
  get law() {
    return this.laws.find((law) => law.name === (this.#field("law").value || this.defaultLaw));
  }

  /** @returns {Asking} */
  asking() {
    const seed = this.#field("seed").value;
    return {
      temperature: Number(this.#field("temperature").value),
      seed: seed === "" ? Math.floor(Math.random() * RANDOM_SEEDS) : Number(seed),
      max_tokens: Number(this.#field("max_tokens").value),
      speculation: this.#wishes(),
    };
  }

  /** @returns {Wishes} */
  #wishes() {
    const value = (/** @type {string} */ name) => (this.#field(name).matches(":disabled") ? "" : this.#field(name).value);
    return {
      ...(value("drafter") && { drafter: value("drafter") }),
      ...(value("law") && { law: value("law") }),
      ...(value("max_nodes") && { max_nodes: Number(value("max_nodes")) }),
      ...(value("depth") && { depth: Number(value("depth")) }),
    };
  }

  #changed() {
    save("settings", Object.fromEntries(this.#fields().map((field) => [field.name, said(field)])));
    this.#show();
  }

  #show() {
    byId("temperature-value").textContent = Number(this.#field("temperature").value).toFixed(2);
    const none = this.#field("drafter").value === "none";
    for (const name of ["law", "max_nodes", "depth"]) this.#field(name).disabled = none;
    byId("law-hint").textContent = lawHint(this.law);
    document.body.classList.toggle("uncoloured", !this.#field("colours").checked);
    document.body.classList.toggle("with-rejected", this.#field("rejected").checked);
    const formatted = this.#field("formatted").checked;
    const other = formatted !== this.formatted;
    this.formatted = formatted;
    if (other) this.dispatchEvent(new Event("view"));
    this.dispatchEvent(new Event("change"));
  }

  /** @param {Record<string, string | boolean>} kept */
  #restore(kept) {
    for (const field of this.#fields()) {
      const value = kept[field.name];
      if (field instanceof HTMLInputElement && field.type === "checkbox") field.checked = typeof value === "boolean" ? value : field.defaultChecked;
      // A drafter that this server does not have is not an error: it stays with the default.
      else if (typeof value === "string" && (!(field instanceof HTMLSelectElement) || has(field, value))) field.value = value;
    }
  }

  /** @returns {(HTMLInputElement | HTMLSelectElement | HTMLTextAreaElement)[]} */
  #fields() {
    return Array.from(this.form.querySelectorAll("[name]"));
  }

  /** @param {string} name @returns {HTMLInputElement} */
  #field(name) {
    return byId(name);
  }
}

/** @param {HTMLInputElement | HTMLSelectElement | HTMLTextAreaElement} field */
function said(field) {
  return field instanceof HTMLInputElement && field.type === "checkbox" ? field.checked : field.value;
}

/** @param {HTMLSelectElement} field @param {string} value */
function has(field, value) {
  return Array.from(field.options).some((option) => option.value === value);
}

/** @param {string} value @param {string} label @returns {[string, string]} */
function pair(value, label) {
  return [value, label];
}

/** @param {[string, string][]} pairs */
function options(pairs) {
  return pairs.map(([value, label]) => el("option", { value }, label));
}

/**
 * Lossless laws first, those for every tree before those that want special ones; then the others, marked.
 * @param {Law[]} laws
 */
function lawGroups(laws) {
  const everyTree = (/** @type {Law} */ law) => law.exact_for === "every tree";
  /** @type {[string, Law[]][]} */
  const groups = [
    ["Lossless, for every tree", laws.filter((law) => law.lossless && everyTree(law))],
    ["Lossless, for special trees only", laws.filter((law) => law.lossless && !everyTree(law))],
    ["Not lossless: may change the text", laws.filter((law) => !law.lossless)],
  ];
  const label = (/** @type {Law} */ { name, lossless, exact_for }) =>
    !lossless ? `${name} (not lossless)` : exact_for === "every tree" ? name : `${name} – ${exact_for}`;
  return groups
    .filter(([, members]) => members.length)
    .map(([title, members]) => el("optgroup", { label: title }, ...options(members.map((law) => pair(law.name, label(law))))));
}

/** @param {Law | undefined} law */
function lawHint(law) {
  if (!law) return "";
  if (!law.lossless) return "Not lossless: the text may be another than the model’s own.";
  if (law.name === "match") return "Lossless: the very tokens plain decoding gives.";
  return "Lossless: the model’s distribution, maybe by other tokens.";
}
