import { expect, it } from "vitest";
import type { Run, UsageEvent, UsageInfo } from "../src/api/types";
import { secondsLeft } from "../src/series/progress";
import { settingRows } from "../src/series/settings";
import { bucketsOf, price, sumsBy, total } from "../src/series/usage";

const HOUR = 3_600_000;

function used(hour: number, info: UsageInfo, model = "a"): UsageEvent {
  const at = (number: number) => new Date(number * HOUR).toISOString();
  return {
    bucket_start: at(hour),
    bucket_end: at(hour + 1),
    base_model: model,
    user_id: "t",
    user_name: "t",
    event_info: info,
  };
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

function run(facts: Partial<Run>): Run {
  return {
    training_run_id: "x",
    base_model: "m",
    model_owner: "t",
    is_lora: true,
    lora_rank: 4,
    corrupted: false,
    created_at: "2026-01-01T00:00:00Z",
    session_id: "s",
    state: "ready",
    last_request_time: "2026-01-01T00:00:00Z",
    ...facts,
  };
}

it("settings of runs are compared with their metadata, without what only the server reads", () => {
  const metadata: Record<string, string>[] = [
    { lr: "1e-4", seed: "1" },
    { lr: "1e-3", seed: "1", "tinsmith-total-steps": "5" },
  ];
  const rows = settingRows(metadata.map((user_metadata) => run({ user_metadata })));
  expect(rows.filter((row) => row.differs).map((row) => [row.name, row.values])).toEqual([["lr", ["1e-4", "1e-3"]]]);
});

it("the time left is unknown as soon as a run has been silent for longer", () => {
  const last = Date.parse("2026-01-01T12:00:00Z");
  const at = (left: number, state: Run["state"] = "ready") =>
    run({ state, progress: { step: 1, last_step_at: "2026-01-01T12:00:00Z", eta_seconds: left } });
  expect(secondsLeft(at(10), last + 60_000)).toBe(10);
  expect(secondsLeft(at(10), last + 180_000)).toBeUndefined();
  expect(secondsLeft(at(3600), last + 1_800_000)).toBe(3600);
  expect(secondsLeft(at(10, "released"), last)).toBeUndefined();
  expect(secondsLeft(run({}), last)).toBeUndefined();
});
