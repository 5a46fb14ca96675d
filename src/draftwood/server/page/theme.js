// @ts-check
/** Light, dark or as the system says. Loaded before the first paint, so that nothing flashes. */

import { load, save } from "./store.js";

const THEMES = ["auto", "light", "dark"];
let theme = THEMES.includes(load("theme")) ? load("theme") : "auto";
document.documentElement.dataset.theme = theme;

/** Let a button go through the themes. @param {HTMLElement} button */
export function themeButton(button) {
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    save("theme", theme);
    show();
  });
  show();
}
