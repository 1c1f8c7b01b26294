/** The prices of tokens, which only this browser knows. */

import { KINDS, type Kind, type Prices } from "../series/usage";

const KEY = "tinsmith-prices";

class StoredPrices {
  values = $state<Prices>({ training: 0, prompt: 0, cached: 0, sampled: 0 });
  currency = $state("EUR");

  constructor() {
    try {
      const stored = JSON.parse(localStorage.getItem(KEY) ?? "{}") as { currency?: unknown } & Partial<
        Record<Kind, unknown>
      >;
      for (const kind of KINDS) {
        const value = stored[kind];
        if (typeof value === "number" && value >= 0) this.values[kind] = value;
      }
      if (typeof stored.currency === "string") this.currency = stored.currency;
    } catch {
      localStorage.removeItem(KEY);
    }
  }

  get areSet(): boolean {
    return KINDS.some((kind) => this.values[kind] > 0);
  }

  keep(): void {
    localStorage.setItem(KEY, JSON.stringify({ ...this.values, currency: this.currency }));
  }
}

export const prices = new StoredPrices();
