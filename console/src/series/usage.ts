/** Sums of usage, by hour and by subject, and their price. */

import type { UsageEvent } from "../api/types";

export const KINDS = ["training", "prompt", "cached", "sampled"] as const;
export type Kind = (typeof KINDS)[number];

export const KIND_NAMES: Record<Kind, string> = {
  training: "Trained",
  prompt: "Prompt",
  cached: "Cached prompt",
  sampled: "Sampled",
};

/** The price of a million tokens of each kind. */
export type Prices = Record<Kind, number>;

export interface Sums {
  tokens: Record<Kind, number>;
  checkpoints: number;
  gigabyteHours: number;
}

export function emptySums(): Sums {
  return { tokens: { training: 0, prompt: 0, cached: 0, sampled: 0 }, checkpoints: 0, gigabyteHours: 0 };
}

export function addEvent(sums: Sums, { event_info: info }: UsageEvent): void {
  switch (info.type) {
    case "training":
      sums.tokens.training += info.token_count;
      break;
    case "sampling_prefill":
      sums.tokens[info.cached ? "cached" : "prompt"] += info.token_count;
      break;
    case "sampling_sample":
      sums.tokens.sampled += info.token_count;
      break;
    case "checkpoint":
      sums.checkpoints += info.count;
      break;
    case "storage":
      sums.gigabyteHours += info.gigabyte_hours;
  }
}

/** Return the sums of each key, in the order in which the keys first occur. */
export function sumsBy(events: UsageEvent[], keyOf: (event: UsageEvent) => string): Map<string, Sums> {
  const found = new Map<string, Sums>();
  for (const event of events) {
    const key = keyOf(event);
    const sums = found.get(key) ?? emptySums();
    addEvent(sums, event);
    found.set(key, sums);
  }
  return found;
}

export function total(events: UsageEvent[]): Sums {
  const sums = emptySums();
  for (const event of events) addEvent(sums, event);
  return sums;
}

export function price(sums: Sums, prices: Prices): number {
  return KINDS.reduce((sum, kind) => sum + (sums.tokens[kind] / 1e6) * prices[kind], 0);
}

export interface Bar {
  start: number;
  sums: Sums;
}

const HOUR_MS = 3_600_000;
const MOST_BARS = 24 * 7;

/** Return one bar for each hour, or for each day of a longer time, also where nothing was used. */
export function bucketsOf(events: UsageEvent[], from: number, to: number): Bar[] {
  const width = (to - from) / HOUR_MS > MOST_BARS + 1 ? 24 * HOUR_MS : HOUR_MS;
  const first = Math.floor(from / width);
  const sums = sumsBy(events, (event) => String(Math.floor(Date.parse(event.bucket_start) / width)));
  const found: Bar[] = [];
  for (let bucket = first; bucket * width < to; bucket += 1) {
    found.push({ start: bucket * width, sums: sums.get(String(bucket)) ?? emptySums() });
  }
  return found;
}
