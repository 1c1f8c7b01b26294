/** A value from the server, its error, and whether it has come. */

import { ConnectionLost } from "../api/client";
import { connection } from "./connection.svelte";

export class Loading<T> {
  value = $state.raw<T | undefined>(undefined);
  error = $state.raw<Error | null>(null);
  #sent = 0;
  #shown = 0;

  constructor(private readonly ask: () => Promise<T>) {}

  get isFirst(): boolean {
    return this.value === undefined && this.error === null;
  }

  /** Ask again. An answer that a later one has overtaken is dropped. After a lost connection, it asks once more. */
  refresh = async (): Promise<void> => {
    this.#sent += 1;
    const number = this.#sent;
    try {
      const value = await this.ask();
      if (this.#isOvertaken(number)) return;
      this.value = value;
      this.error = null;
    } catch (error) {
      if (error instanceof ConnectionLost) {
        connection.whenRestored(this.refresh);
        return;
      }
      if (this.#isOvertaken(number)) return;
      this.error = error as Error;
    }
  };

  #isOvertaken(number: number): boolean {
    if (number < this.#shown) return true;
    this.#shown = number;
    return false;
  }
}
