// @ts-check
/** Numbers and tokens as people read them. */

/** @param {number | null | undefined} value @param {number} [digits] */
export function number(value, digits = 1) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}

/** @param {number | null | undefined} value */
export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

/** A probability: enough digits to tell a small one from none. @param {number | null | undefined} value */
export function chance(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.001 ? value.toExponential(0) : value.toFixed(value < 0.1 ? 3 : 2);
}

/**
 * The drafter's probability. A guess without one was chosen: the likeliest, or what stood there before.
 * @param {number | null | undefined} q
 * @param {boolean} guessed
 */
export function drawn(q, guessed) {
  return guessed && (q === null || q === undefined) ? "chosen, not drawn" : chance(q);
}

/** @param {number} seconds @param {number} [digits]  Of milliseconds. */
export function duration(seconds, digits = 0) {
  return seconds < 1 ? `${(1000 * seconds).toFixed(digits)} ms` : `${seconds.toFixed(2)} s`;
}

/** @param {number} count @param {string} one @param {string} [many] */
export function counted(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/** A token with its white space made visible; many spaces are counted. @param {string} text */
export function visible(text) {
  const spaces = (/** @type {string} */ run) => (run.length > 3 ? `·×${run.length}` : "·".repeat(run.length));
  return text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/ +/g, spaces);
}

/** @param {string} text @param {number} length */
export function shortened(text, length) {
  const characters = [...text];
  return characters.length <= length ? text : `${characters.slice(0, length - 1).join("")}…`;
}
