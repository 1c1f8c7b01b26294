/** The colours: as the system says, light or dark. */

export type Choice = "system" | "light" | "dark";
const KEY = "tinsmith-theme";
const ORDER: Choice[] = ["system", "light", "dark"];

class Theme {
  choice = $state<Choice>("system");
  /** A number that changes when the colours change, for what is drawn on a canvas. */
  version = $state(0);

  constructor() {
    const stored = localStorage.getItem(KEY);
    this.#apply(stored === "light" || stored === "dark" ? stored : "system");
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.version += 1));
  }

  next(): void {
    this.#apply(ORDER[(ORDER.indexOf(this.choice) + 1) % ORDER.length] ?? "system");
  }

  #apply(choice: Choice): void {
    this.choice = choice;
    this.version += 1;
    if (choice === "system") {
      localStorage.removeItem(KEY);
      delete document.documentElement.dataset.theme;
    } else {
      localStorage.setItem(KEY, choice);
      document.documentElement.dataset.theme = choice;
    }
  }
}

export const theme = new Theme();
