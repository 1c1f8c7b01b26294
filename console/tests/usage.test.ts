import { expect, it } from "vitest";
import type { Run, UsageEvent, UsageInfo } from "../src/api/types";
import { settingRows } from "../src/series/settings";
import { bucketsOf, price, sumsBy, total } from "../src/series/usage";

const HOUR = 3_600_000;

function used(hour: number, info: UsageInfo, model = "a"): UsageEvent {
  const at = (number: number) => new Date(number * HOUR).toISOString();
  return { bucket_start: at(hour), bucket_end: at(hour + 1), base_model: model, user_id: "t", user_name: "t", event_info: info };
}

const EVENTS: UsageEvent[] = [
  used(10, { type: "training", token_count: 1_000_000 }),
  used(10, { type: "sampling_prefill", cached: true, token_count: 5 }, "b"),
  used(12, { type: "sampling_prefill", cached: false, token_count: 7 }),
  used(12, { type: "sampling_sample", token_count: 500_000 }),
  used(12, { type: "checkpoint", count: 2 }),
  used(12, { type: "storage", free: false, gigabyte_hours: 0.5 }),
];

it("sums keep each kind apart", () => {
  expect(total(EVENTS)).toEqual({
    tokens: { training: 1_000_000, prompt: 7, cached: 5, sampled: 500_000 },
    checkpoints: 2,
    gigabyteHours: 0.5,
  });
  expect([...sumsBy(EVENTS, (event) => event.base_model).keys()]).toEqual(["a", "b"]);
});

it("a price is that of a million tokens", () => {
  expect(price(total(EVENTS), { training: 2, prompt: 0, cached: 0, sampled: 6 })).toBeCloseTo(5);
});

it("hours without usage have a bar too, and a month has one for each day", () => {
  const bars = bucketsOf(EVENTS, 9 * HOUR, 14 * HOUR);
  expect(bars.map((bar) => bar.sums.tokens.training)).toEqual([0, 1_000_000, 0, 0, 0]);
  expect(bucketsOf(EVENTS, 0, 30 * 24 * HOUR)).toHaveLength(30);
});

it("settings of runs are compared with their metadata", () => {
  const run = (rank: number, metadata: Record<string, string>): Run => ({
    training_run_id: "x",
    base_model: "m",
    model_owner: "t",
    lora_rank: rank,
    corrupted: false,
    is_lora: true,
    created_at: "2026-01-01T00:00:00Z",
    session_id: "s",
    state: "ready",
    last_request_time: "2026-01-01T00:00:00Z",
    user_metadata: metadata,
  });
  const rows = settingRows([run(4, { lr: "1e-4", seed: "1" }), run(4, { lr: "1e-3", seed: "1" })]);
  expect(rows.filter((row) => row.differs).map((row) => [row.name, row.values])).toEqual([["lr", ["1e-4", "1e-3"]]]);
});
