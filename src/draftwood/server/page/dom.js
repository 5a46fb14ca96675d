// @ts-check
/** Elements in one line. Text only ever goes in as text. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * The element of the page with this id; that it is there is our own promise.
 * @template {HTMLElement} [T=HTMLElement]
 * @param {string} id
 * @returns {T}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return /** @type {T} */ (found);
}

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string>} [attributes]
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/**
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} children
 * @returns {SVGElementTagNameMap[K]}
 */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/**
 * A button that says what it does.
 * @param {string} label
 * @param {() => void} act
 */
export function button(label, act) {
  const made = el("button", { type: "button", class: "quiet" }, label);
  made.addEventListener("click", act);
  return made;
}

/**
 * A button that copies a text, and says whether it did.
 * @param {string} label
 * @param {() => string} text
 * @param {Element} shown  Where the text stands on the page.
 */
export function copyButton(label, text, shown) {
  const made = button(label, async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      // No clipboard without TLS or permission: mark the text, so that one key is enough.
      getSelection()?.selectAllChildren(shown);
      made.textContent = "Marked: press Ctrl+C";
    }
    setTimeout(() => (made.textContent = label), 2000);
  });
  return made;
}

/**
 * Calls `act` at most once in `milliseconds`, and once more for whatever came in between.
 * @param {number} milliseconds
 * @param {() => void} act
 */
export function throttled(milliseconds, act) {
  let last = -Infinity;
  /** @type {number | undefined} */
  let waiting;
  const run = () => {
    waiting = undefined;
    last = performance.now();
    act();
  };
  return () => {
    if (waiting !== undefined) return;
    const wait = last + milliseconds - performance.now();
    if (wait <= 0) run();
    else waiting = setTimeout(run, wait);
  };
}
