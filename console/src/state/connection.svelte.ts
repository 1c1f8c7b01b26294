/** Whether the server answers, and how many calls wait for their answers. */

class Connection {
  isLost = $state(false);
  calls = $state(0);
  #lostAt = 0;
  #waiting = new Set<() => unknown>();

  lose(): void {
    this.isLost = true;
    this.#lostAt = performance.now();
  }

  /** Note an answer to a call that was sent at `sentAt`. An answer to a call from before the loss proves nothing. */
  restore(sentAt: number): void {
    if (!this.isLost || sentAt < this.#lostAt) return;
    this.isLost = false;
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const call of waiting) call();
  }

  /** Make a call again as soon as the server answers. */
  whenRestored(call: () => unknown): void {
    this.#waiting.add(call);
  }
}

export const connection = new Connection();
