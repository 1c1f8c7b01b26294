/** A value from the server, its error, and whether it has come. */

import { ConnectionLost } from "../api/client";

export class Loading<T> {
  value = $state.raw<T | undefined>(undefined);
  error = $state.raw<Error | null>(null);
  #latest = 0;

  constructor(private readonly ask: () => Promise<T>) {}

  get isFirst(): boolean {
    return this.value === undefined && this.error === null;
  }

  /** Ask again. An answer that a later one has overtaken is dropped. The banner of the page reports a lost connection. */
  refresh = async (): Promise<void> => {
    this.#latest += 1;
    const number = this.#latest;
    try {
      const value = await this.ask();
      if (number !== this.#latest) return;
      this.value = value;
      this.error = null;
    } catch (error) {
      if (number !== this.#latest || error instanceof ConnectionLost) return;
      this.error = error as Error;
    }
  };
}
