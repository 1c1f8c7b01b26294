/** Sentences for the reader about finished changes. A screen reader speaks them when it is idle. */

const SHOWN_MS = 6000;

class Announcements {
  text = $state("");
  #timer: ReturnType<typeof setTimeout> | undefined;

  say(text: string): void {
    clearTimeout(this.#timer);
    this.text = text;
    this.#timer = setTimeout(() => (this.text = ""), SHOWN_MS);
  }
}

export const announcements = new Announcements();
