// @ts-check
/** Prompts to start with. */

/** Code that comes back almost as it was: most guesses come true. */
export const EDIT = `Rename the class Basket to Cart. Print the whole code again.

\`\`\`python
class Basket:
    def __init__(self):
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)
\`\`\``;

/** @type {{label: string, hint: string, prompt: string}[]} */
export const SAMPLES = [
  { label: "Edit code", hint: "The answer repeats its prompt, so most guesses are accepted.", prompt: EDIT },
  {
    label: "Write prose",
    hint: "New words are hard to guess, so fewer are accepted.",
    prompt: "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
  },
  {
    label: "Make a list",
    hint: "Headings, lists and code are formatted as they arrive.",
    prompt: "Give three tips for writing readable Python, as a numbered Markdown list with a heading and a short code example for each tip.",
  },
];
