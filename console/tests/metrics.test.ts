import { describe, expect, it } from "vitest";
import type { Metrics, Reported, Step } from "../src/api/types";
import { RunPoints, smooth, summary, TRAINING } from "../src/series/metrics";

const time = "2026-01-01T00:00:00Z";

function answer(steps: Step[], reported: Reported[] = []): Metrics {
  return {
    steps,
    reported,
    after: steps.at(-1)?.position ?? 0,
    after_reported: reported.at(-1)?.revision ?? 0,
    more: false,
  };
}

function step(position: number, values: Partial<Step> = {}): Step {
  return { position, step: position, time, steps: 1, tokens: 0, ...values };
}

function values(points: RunPoints, group: string): Record<string, number[]> {
  const found = points.groups().find((one) => one.name === group)?.curves ?? [];
  return Object.fromEntries(found.map((curve) => [curve.name, curve.points.map((point) => point.value)]));
}

describe("the points of a run", () => {
  it("are the same, however often a connection repeats them", () => {
    const points = new RunPoints();
    points.add(answer([step(1, { loss: 3 }), step(2, { loss: 2 })]));
    points.add(answer([step(2, { loss: 2 }), step(3, { loss: 1 })]));
    expect(values(points, TRAINING)).toEqual({ Loss: [3, 2, 1] });
    expect(points.after).toBe(3);
  });

  it("leave out unknown values and curves without any", () => {
    const points = new RunPoints();
    points.add(
      answer([step(1), step(2, { loss: 2, tokens: 100, seconds: 4 }), step(3, { loss: NaN, tokens: 5, seconds: 0 })]),
    );
    expect(values(points, TRAINING)).toEqual({ Loss: [2], "Tokens per second of the engine": [25] });
  });

  it("merge reported values of a step by name", () => {
    const points = new RunPoints();
    points.add(answer([], [{ revision: 1, step: 5, time, values: { "eval/accuracy": 0.1, reward: 1 } }]));
    points.add(answer([], [{ revision: 2, step: 5, time, values: { "eval/accuracy": 0.2 } }]));
    expect(values(points, "eval")).toEqual({ "eval/accuracy": [0.2] });
    expect(values(points, "Reported")).toEqual({ reward: [1] });
  });

  it("are grouped by the part before the first slash", () => {
    const points = new RunPoints();
    const reported = { "eval/a": 1, "eval/b/c": 2, "reward/mean": 3, "/odd": 4 };
    points.add(answer([step(1, { loss: 1 })], [{ revision: 1, step: 1, time, values: reported }]));
    expect(points.groups().map((group) => group.name)).toEqual([TRAINING, "Reported", "eval", "reward"]);
  });
});

describe("smoothing", () => {
  it("changes no constant curve, also not its start", () => {
    for (const value of smooth(Array(20).fill(4), 0.9)) expect(value).toBeCloseTo(4, 10);
  });

  it("stays between the extremes", () => {
    const noisy = Array.from({ length: 100 }, (_, index) => Math.sin(index * 12.9898) * 3);
    const smoothed = smooth(noisy, 0.6);
    expect(Math.max(...smoothed)).toBeLessThan(Math.max(...noisy));
    expect(Math.min(...smoothed)).toBeGreaterThan(Math.min(...noisy));
  });
});

it("a curve is described in words", () => {
  const points = [3, 1, 2].map((value, index) => ({ step: index + 1, time: 0, value }));
  expect(summary({ name: "Loss", points }, String)).toBe(
    "Loss: 3 points from step 1 to 3. First 3, last 2, lowest 1 at step 2, highest 3 at step 1.",
  );
  expect(summary({ name: "Loss", points: [] }, String)).toBe("Loss: no points yet.");
});
