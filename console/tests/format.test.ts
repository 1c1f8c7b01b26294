import { describe, expect, it } from "vitest";
import {
  ago,
  bytes,
  duration,
  measure,
  modelLabel,
  modelName,
  runName,
  short,
  timeTick,
  UNKNOWN,
  until,
} from "../src/format";

describe("numbers", () => {
  it("show unknown and infinite values as a dash", () => {
    for (const show of [measure, bytes, duration, short]) {
      expect([undefined, null, NaN, Infinity].map((value) => show(value))).toEqual(Array(4).fill(UNKNOWN));
    }
  });

  it("keep four significant digits, whatever their size", () => {
    expect([0, 2.34567, 0.04, 1234.5, 0.00001, 2.5e7, -0.5].map(measure)).toEqual([
      "0",
      "2.346",
      "0.04000",
      "1,235",
      "1.00e-5",
      "2.50e7",
      "-0.5000",
    ]);
  });

  it("count bytes by powers of ten, as the server does", () => {
    expect([0, 999, 1000, 123_456_789, 2.5e12].map(bytes)).toEqual(["0 B", "999 B", "1.0 kB", "123 MB", "2.5 TB"]);
  });
});

describe("times", () => {
  const now = Date.parse("2026-01-01T12:00:00Z");

  it("have the unit in which a person would say them", () => {
    expect([3, 59.6, 75, 1800, 3600, 5400, 200_000].map(duration)).toEqual([
      "3 s",
      "1 min",
      "1 min 15 s",
      "30 min",
      "1 h",
      "1 h 30 min",
      "2 d 7 h",
    ]);
  });

  it("are as exact on an axis as its marks are close", () => {
    const noon = new Date(2026, 0, 2, 12, 30, 15).getTime() / 1000;
    expect([1, 60, 86_400].map((apart) => timeTick(noon, apart))).toEqual(["12:30:15", "12:30", "2 Jan"]);
    expect(timeTick(new Date(2026, 0, 3).getTime() / 1000, 3600)).toBe("3 Jan");
  });

  it("are relative to now", () => {
    expect(ago("2026-01-01T11:59:58Z", now)).toBe("now");
    expect(ago("2026-01-01T11:00:00Z", now)).toBe("1 h ago");
    expect(ago(undefined, now)).toBe(UNKNOWN);
    expect(until("2026-01-02T12:00:00Z", now)).toBe("in 24 h");
    expect(until("2026-01-01T11:00:00Z", now)).toBe("now");
  });
});

it("names tell runs of a session and models of an owner apart", () => {
  expect(runName("sess-0f3b2c1d1111222233334444:train:2")).toBe("0f3b2c1d:2");
  expect(modelLabel("tinker://sess-0f3b2c1d111:train:2/sampler_weights/best")).toBe("best of run 0f3b2c1d:2");
  expect(modelLabel("assistant")).toBe("assistant");
  expect(modelName("Qwen/Qwen3-8B")).toBe("Qwen3-8B");
  expect(modelName("tiny")).toBe("tiny");
});
