// @ts-check
/** Whether two runs can be compared, and how they do. */

const FEWEST = 16; // tokens of an answer that says something about speed
const SHORTEST = 0.05; // seconds; below that a clock and a scheduler say more than the engine
const MARGIN = 1.05; // a speculative step takes no less time than a plain one: beyond its tokens a ratio is noise
const CLOSE = 1.02; // ratios up to this count as a draw

/**
 * @typedef {object} Run
 * @property {number} tokens
 * @property {number} seconds
 * @property {number | null} perStep  Tokens.
 *
 * @typedef {object} Comparison
 * @property {"short" | "unsteady" | "even" | "plain" | "speculative"} result  The winner, or why none is named.
 * @property {number | null} ratio  How many times as fast the winner was; null where that would mean nothing.
 */

/** @param {Run} plain @param {Run} speculative @returns {Comparison} */
export function compared(plain, speculative) {
  const runs = [plain, speculative];
  if (runs.some((run) => run.tokens < FEWEST || run.seconds < SHORTEST)) return { result: "short", ratio: null };
  // By tokens a second: a law that is not lossless may end elsewhere.
  const ratio = (speculative.tokens * plain.seconds) / (plain.tokens * speculative.seconds);
  if (ratio > MARGIN * (speculative.perStep ?? 1)) return { result: "unsteady", ratio: null };
  if (Math.max(ratio, 1 / ratio) < CLOSE) return { result: "even", ratio };
  return ratio > 1 ? { result: "speculative", ratio } : { result: "plain", ratio: 1 / ratio };
}
