/** The time for texts such as "5 s ago", which all change together. */

const EVERY_MS = 5000;

class Clock {
  now = $state(Date.now());

  constructor() {
    setInterval(() => (this.now = Date.now()), EVERY_MS);
  }
}

export const clock = new Clock();
