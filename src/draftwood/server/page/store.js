// @ts-check
/** What survives a reload. A browser that keeps nothing (or has no room) is not an error: it just forgets. */

const PREFIX = "draftwood.";

/** @param {string} name @returns {any} */
export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name) ?? "null");
  } catch {
    return null;
  }
}

/** Whether it was kept. @param {string} name @param {unknown} value */
export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
