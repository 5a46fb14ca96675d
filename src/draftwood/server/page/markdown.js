// @ts-check
/**
 * Markdown as a tree of blocks and spans; nothing here touches the page. Every character keeps its place in the answer,
 * so that what is drawn can still say which token it came from. HTML is not Markdown here: it stays text.
 */

const DEEPEST = 12; // blocks in blocks, or spans in spans; what is nested deeper stays text
const LONGEST_LABEL = 500; // characters of a link's words
const SCHEMES = ["http:", "https:", "mailto:"];

/**
 * @typedef {{type: "text" | "code", passage: Passage}} Leaf
 * @typedef {Leaf | {type: "strong" | "em" | "strike", spans: Span[]} | {type: "link", address: string, spans: Span[]}} Span
 *
 * @typedef {{type: "heading", level: number, spans: Span[]}} Heading
 * @typedef {{type: "paragraph", spans: Span[]}} Paragraph
 * @typedef {{type: "fence", language: string, passage: Passage}} Fence
 * @typedef {{type: "list", ordered: boolean, first: number, items: Block[][]}} List
 * @typedef {{type: "quote", blocks: Block[]}} Quote
 * @typedef {{type: "rule"}} Rule
 * @typedef {(Heading | Paragraph | Fence | List | Quote | Rule) & {from: number}} Block  `from`: where it starts in the answer.
 *
 * @typedef {{block: Heading | Paragraph | Fence | List | Quote | Rule, next: number}} Read  A block, and the line behind it.
 * @typedef {{span: Span, end: number}} Hit  A span, and the character behind it.
 */

/** Characters of an answer, and where each of them stands in it. */
export class Passage {
  /** @param {string} text @param {number[]} places */
  constructor(text, places) {
    this.text = text;
    this.places = places;
  }

  /** @param {string} text @param {number} [from]  Where it starts in the answer. */
  static of(text, from = 0) {
    return new Passage(text, Array.from({ length: text.length }, (_, i) => from + i));
  }

  /** @param {Passage[]} parts */
  static join(parts) {
    return new Passage(parts.map((part) => part.text).join(""), parts.flatMap((part) => part.places));
  }

  /** @param {number} from @param {number} [to] */
  slice(from, to) {
    return new Passage(this.text.slice(from, to), this.places.slice(from, to));
  }

  /** Without the line break at its end. @returns {Passage} */
  get trimmed() {
    return this.text.endsWith("\n") ? this.slice(0, -1) : this;
  }

  /** Each with its line break. */
  get lines() {
    const ends = [...this.text.matchAll(/\n/g)].map((found) => found.index + 1);
    const all = [0, ...ends].map((start, i) => this.slice(start, ends[i] ?? this.text.length));
    return all.filter((line) => line.text !== "");
  }
}

const BLANK = /^\s*$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)(.*)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})\n?$/;
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\n]*?)[ \t]*\n?$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|(?=\n?$))/;
const INTERRUPTING_ITEM = /^ {0,3}(?:[-*+]|1[.)])[ \t]+\S/;

/** @param {Passage} passage @param {number} [depth] @returns {Block[]} */
export function blocks(passage, depth = 0) {
  const lines = passage.lines;
  /** @type {Block[]} */
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (BLANK.test(lines[i].text)) {
      i += 1;
      continue;
    }
    const { block, next } = readBlock(lines, i, depth);
    found.push({ ...block, from: lines[i].places[0] });
    i = next;
  }
  return found;
}

/** @param {Passage[]} lines @param {number} i @param {number} depth @returns {Read} */
function readBlock(lines, i, depth) {
  const nested = depth < DEEPEST ? (readQuote(lines, i, depth) ?? readList(lines, i, depth)) : null;
  return readFence(lines, i) ?? readHeading(lines, i) ?? readRule(lines, i) ?? nested ?? readParagraph(lines, i);
}

/** A fence that nothing closes goes to the end: the answer may still be coming. @param {Passage[]} lines @param {number} i @returns {Read | null} */
function readFence(lines, i) {
  const opened = FENCE.exec(lines[i].text);
  if (!opened) return null;
  const [, indent, marks, language] = opened;
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*\\n?$`);
  const end = lines.findIndex((line, at) => at > i && closing.test(line.text));
  const inside = lines.slice(i + 1, end < 0 ? lines.length : end);
  const passage = Passage.join(inside.map((line) => outdented(line, indent.length))).trimmed;
  return { block: { type: "fence", language, passage }, next: end < 0 ? lines.length : end + 1 };
}

/** @param {Passage[]} lines @param {number} i @returns {Read | null} */
function readHeading(lines, i) {
  const found = HEADING.exec(lines[i].text);
  if (!found) return null;
  const words = found[2].trim().replace(/(^|[ \t]+)#+$/, "");
  const from = lines[i].text.indexOf(words, lines[i].text.indexOf("#") + found[1].length);
  const spans = inline(lines[i].slice(from, from + words.length));
  return { block: { type: "heading", level: found[1].length, spans }, next: i + 1 };
}

/** @param {Passage[]} lines @param {number} i @returns {Read | null} */
function readRule(lines, i) {
  return RULE.test(lines[i].text) ? { block: { type: "rule" }, next: i + 1 } : null;
}

/** @param {Passage[]} lines @param {number} i @param {number} depth @returns {Read | null} */
function readQuote(lines, i, depth) {
  let next = i;
  while (next < lines.length && QUOTE.test(lines[next].text)) next += 1;
  if (next === i) return null;
  const inside = lines.slice(i, next).map((line) => line.slice(/** @type {string[]} */ (QUOTE.exec(line.text))[0].length));
  return { block: { type: "quote", blocks: blocks(Passage.join(inside), depth + 1) }, next };
}

/** @param {Passage[]} lines @param {number} i @param {number} depth @returns {Read | null} */
function readList(lines, i, depth) {
  const opened = ITEM.exec(lines[i].text);
  if (!opened) return null;
  const ordered = /\d/.test(opened[2]);
  /** @type {Block[][]} */
  const items = [];
  let next = i;
  /** @type {RegExpExecArray | null} */
  let item = opened;
  while (item && /\d/.test(item[2]) === ordered) {
    const width = item[0].length;
    const end = itemEnd(lines, next, item);
    const inside = lines.slice(next + 1, end).map((line) => outdented(line, width));
    items.push(blocks(Passage.join([lines[next].slice(width), ...inside]), depth + 1));
    next = end;
    item = next < lines.length && !RULE.test(lines[next].text) ? ITEM.exec(lines[next].text) : null;
  }
  return { block: { type: "list", ordered, first: ordered ? parseInt(opened[2], 10) : 1, items }, next };
}

/**
 * The line behind an item: what is indented belongs to it, and so does a line that goes on with its paragraph.
 * @param {Passage[]} lines @param {number} i @param {RegExpExecArray} item
 */
function itemEnd(lines, i, item) {
  const enough = Math.min(item[0].length, item[1].length + 2); // many models indent by less than they should
  let end = i + 1;
  let afterBlank = false;
  for (; end < lines.length; end += 1) {
    const { text } = lines[end];
    const blank = BLANK.test(text);
    if (!blank && indentOf(text) < enough) {
      if (ITEM.test(text)) return end;
      if (afterBlank || startsBlock(text) || FENCE.test(lines[end - 1].text.trimStart())) break;
    }
    afterBlank = blank;
  }
  // Blank lines at the end separate the list from what follows.
  while (end > i + 1 && end < lines.length && BLANK.test(lines[end - 1].text)) end -= 1;
  return end;
}

/** @param {Passage[]} lines @param {number} i @returns {Read} */
function readParagraph(lines, i) {
  let next = i + 1;
  while (next < lines.length && !BLANK.test(lines[next].text) && !startsBlock(lines[next].text)) next += 1;
  return { block: { type: "paragraph", spans: inline(Passage.join(lines.slice(i, next)).trimmed) }, next };
}

/** Whether a line ends the paragraph before it. @param {string} line */
function startsBlock(line) {
  return [HEADING, RULE, FENCE, QUOTE, INTERRUPTING_ITEM].some((pattern) => pattern.test(line));
}

/** @param {string} line */
function indentOf(line) {
  return line.length - line.trimStart().length;
}

/** @param {Passage} line @param {number} most */
function outdented(line, most) {
  const spaces = /^ */.exec(line.text)?.[0].length ?? 0;
  return line.slice(Math.min(spaces, most));
}

const SPECIAL = /[\\`*_~[!<h]/g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]*)>/y;
const BARE = /https?:\/\/[^\s<>"'`*()[\]{}]+/y;
const TARGET = /\([ \t\n]*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:[ \t\n]+(?:"[^"]*"|'[^']*'))?[ \t\n]*\)/y;

/** @param {Passage} passage @returns {Span[]} */
export function inline(passage) {
  return new Inline(passage, 0, false).read();
}

/** Spans of one paragraph. */
class Inline {
  /** @param {Passage} passage @param {number} depth @param {boolean} linked  Inside of a link there are no others. */
  constructor(passage, depth, linked) {
    this.passage = passage;
    this.text = passage.text;
    this.depth = depth;
    this.linked = linked;
    /** Marks that close nowhere further on: they are looked for once. @type {Set<string>} */
    this.unclosed = new Set();
  }

  /** @returns {Span[]} */
  read() {
    /** @type {Span[]} */
    const found = [];
    let from = 0;
    const plain = (/** @type {number} */ to) => to > from && found.push(this.#leaf("text", from, to));
    for (let i = this.#special(0); i >= 0 && this.depth < DEEPEST; ) {
      const hit = this.#at(i);
      if (hit) {
        plain(i);
        found.push(hit.span);
        from = hit.end;
      }
      i = this.#special(hit ? hit.end : i + 1);
    }
    plain(this.text.length);
    return found;
  }

  /** Where the next character stands that may mean something. @param {number} from */
  #special(from) {
    SPECIAL.lastIndex = from;
    return SPECIAL.exec(this.text)?.index ?? -1;
  }

  /** @param {"text" | "code"} type @param {number} from @param {number} to @returns {Leaf} */
  #leaf(type, from, to) {
    return { type, passage: this.passage.slice(from, to) };
  }

  /** @param {number} from @param {number} to @param {boolean} [linked] */
  #inside(from, to, linked = this.linked) {
    return new Inline(this.passage.slice(from, to), this.depth + 1, linked).read();
  }

  /** @param {number} i @returns {Hit | null} */
  #at(i) {
    switch (this.text[i]) {
      case "\\":
        return this.#escaped(i);
      case "`":
        return this.#code(i);
      case "!":
        // A picture would be fetched from somewhere: it stays text.
        return this.text[i + 1] === "[" ? this.#literally(i, i + 2) : null;
      case "[":
        return this.linked ? null : this.#link(i);
      case "<":
      case "h":
        return this.linked ? null : this.#address(i);
      default:
        return this.#emphasis(i);
    }
  }

  /** @param {number} from @param {number} to @returns {Hit} */
  #literally(from, to) {
    return { span: this.#leaf("text", from, to), end: to };
  }

  /** @param {number} i @returns {Hit | null} */
  #escaped(i) {
    return PUNCTUATION.test(this.text[i + 1] ?? "") ? { span: this.#leaf("text", i + 1, i + 2), end: i + 2 } : null;
  }

  /** @param {number} i @returns {Hit} */
  #code(i) {
    const start = i + this.#run(i);
    const close = this.#codeEnd(i);
    if (close < 0) return this.#literally(i, start);
    const padded = /^ .*[^ ].* $/s.test(this.text.slice(start, close)) ? 1 : 0;
    return { span: this.#leaf("code", start + padded, close - padded), end: close + start - i };
  }

  /** Where the marks stand that close the code which opens here, or -1. @param {number} i */
  #codeEnd(i) {
    const marks = this.text.slice(i, i + this.#run(i));
    if (this.unclosed.has(marks)) return -1;
    let at = i + marks.length;
    while ((at = this.text.indexOf("`", at)) >= 0) {
      const length = this.#run(at);
      if (length === marks.length) return at;
      at += length;
    }
    this.unclosed.add(marks);
    return -1;
  }

  /** How often a character is repeated. @param {number} i */
  #run(i) {
    let end = i;
    while (this.text[end] === this.text[i]) end += 1;
    return end - i;
  }

  /** @param {number} i @returns {Hit} */
  #emphasis(i) {
    const length = this.#run(i);
    const start = i + length;
    const close = this.#opens(i, length) ? this.#closing(start, this.text.slice(i, start)) : -1;
    if (close < 0) return this.#literally(i, start);
    const inner = this.#inside(start, close);
    /** @type {Span} */
    let span = { type: this.text[i] === "~" ? "strike" : length === 1 ? "em" : "strong", spans: inner };
    if (length === 3) span = { type: "em", spans: [span] };
    return { span, end: close + length };
  }

  /** @param {number} i @param {number} length */
  #opens(i, length) {
    const mark = this.text[i];
    const [before, after] = [this.text[i - 1] ?? " ", this.text[i + length] ?? " "];
    if (/\s/.test(after) || length > 3 || (mark === "~" && length !== 2)) return false;
    return mark !== "_" || !WORD.test(before);
  }

  /** Where the same marks close again, or -1. @param {number} from @param {string} marks */
  #closing(from, marks) {
    if (this.unclosed.has(marks)) return -1;
    for (let at = from; at < this.text.length; ) {
      const character = this.text[at];
      const code = character === "`" ? this.#codeEnd(at) : -1;
      const length = character === "`" || character === marks[0] ? this.#run(at) : 1;
      if (character === marks[0] && length === marks.length && this.#closes(at, length)) return at;
      at = code >= 0 ? code + length : at + (character === "\\" ? 2 : length);
    }
    this.unclosed.add(marks);
    return -1;
  }

  /** @param {number} i @param {number} length */
  #closes(i, length) {
    if (/\s/.test(this.text[i - 1])) return false;
    return this.text[i] !== "_" || !WORD.test(this.text[i + length] ?? " ");
  }

  /** @param {number} i @returns {Hit | null} */
  #link(i) {
    const close = this.#labelEnd(i);
    if (close < 0) return null;
    TARGET.lastIndex = close + 1;
    const target = TARGET.exec(this.text);
    const address = target && safeAddress((target[1] ?? target[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"));
    if (!target || !address) return null;
    const spans = this.#inside(i + 1, close, true);
    return { span: { type: "link", address, spans }, end: TARGET.lastIndex };
  }

  /** @param {number} i */
  #labelEnd(i) {
    let open = 0;
    for (let at = i; at < Math.min(this.text.length, i + LONGEST_LABEL); at += 1) {
      if (this.text[at] === "\\") at += 1;
      else if (this.text[at] === "[") open += 1;
      else if (this.text[at] === "]" && --open === 0) return at;
    }
    return -1;
  }

  /** An address that stands for itself. @param {number} i @returns {Hit | null} */
  #address(i) {
    const angled = this.text[i] === "<";
    if (!angled && WORD.test(this.text[i - 1] ?? " ")) return null;
    const pattern = angled ? ANGLED : BARE;
    pattern.lastIndex = i;
    const found = pattern.exec(this.text);
    if (!found) return null;
    const written = angled ? found[1] : found[0].replace(/[.,;:!?]+$/, "");
    const address = safeAddress(written);
    if (!address) return null;
    const from = i + (angled ? 1 : 0);
    const spans = [this.#leaf("text", from, from + written.length)];
    return { span: { type: "link", address, spans }, end: from + written.length + (angled ? 1 : 0) };
  }
}

/** The address a link may have: absolute, and nothing that a browser would run. @param {string} written */
export function safeAddress(written) {
  const url = URL.canParse(written) ? new URL(written) : null;
  return url && SCHEMES.includes(url.protocol) ? url.href : null;
}
