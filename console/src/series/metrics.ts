/** The points of a run, merged from the answers of the server, and the charts that can be drawn from them. */

import type { Metrics, Step } from "../api/types";

export interface Point {
  step: number;
  /** Seconds since 1970. */
  time: number;
  value: number;
}

export interface Curve {
  name: string;
  points: Point[];
}

/** Charts with the same part of their names before the first `/`. */
export interface Group {
  name: string;
  curves: Curve[];
}

interface Values {
  time: number;
  values: Record<string, number>;
}

const BUILT_IN: { name: string; of: (step: Step) => number | undefined }[] = [
  { name: "Loss", of: (step) => step.loss },
  { name: "Gradient norm", of: (step) => step.grad_norm },
  { name: "Learning rate", of: (step) => step.learning_rate },
  { name: "Tokens per second of the engine", of: tokensPerSecond },
  { name: "Sampler gap", of: (step) => step.sampler_gap },
];
export const TRAINING = "Training";
const OTHER = "Reported";

export function tokensPerSecond(step: Step): number | undefined {
  return step.seconds ? step.tokens / step.seconds : undefined;
}

/** All points of one run. The same point may come twice, because a new connection repeats the last ones. */
export class RunPoints {
  after = 0;
  afterReported = 0;
  #steps = new Map<number, Step>();
  #reported = new Map<number, Values>();

  get isEmpty(): boolean {
    return this.#steps.size === 0 && this.#reported.size === 0;
  }

  /** Add an answer, and return whether it brought a point. */
  add(metrics: Metrics): boolean {
    for (const step of metrics.steps) this.#steps.set(step.position, step);
    for (const { step, time, values } of metrics.reported) {
      const before = this.#reported.get(step);
      this.#reported.set(step, { time: seconds(time), values: { ...before?.values, ...values } });
    }
    this.after = Math.max(this.after, metrics.after);
    this.afterReported = Math.max(this.afterReported, metrics.after_reported);
    return metrics.steps.length > 0 || metrics.reported.length > 0;
  }

  /** Return the charts: those of the training first, then one group for each prefix of a reported name. */
  groups(): Group[] {
    const steps = [...this.#steps.values()].sort((a, b) => a.step - b.step || a.position - b.position);
    const training = BUILT_IN.map(({ name, of }) => ({ name, points: pointsOf(steps, of) }));
    const groups = [{ name: TRAINING, curves: training.filter((curve) => curve.points.length > 0) }, ...this.#named()];
    return groups.filter((group) => group.curves.length > 0);
  }

  #named(): Group[] {
    const curves = new Map<string, Point[]>();
    for (const [step, { time, values }] of [...this.#reported].sort(([a], [b]) => a - b)) {
      for (const [name, value] of Object.entries(values)) {
        const points = curves.get(name) ?? [];
        points.push({ step, time, value });
        curves.set(name, points);
      }
    }
    const groups = new Map<string, Curve[]>();
    for (const name of [...curves.keys()].sort()) {
      const slash = name.indexOf("/");
      const prefix = slash > 0 ? name.slice(0, slash) : OTHER;
      groups.set(prefix, [...(groups.get(prefix) ?? []), { name, points: curves.get(name) ?? [] }]);
    }
    return [...groups].map(([name, found]) => ({ name, curves: found }));
  }
}

function pointsOf(steps: Step[], of: (step: Step) => number | undefined): Point[] {
  return steps.flatMap((step) => {
    const value = of(step);
    return value === undefined || !Number.isFinite(value) ? [] : [{ step: step.step, time: seconds(step.time), value }];
  });
}

function seconds(time: string): number {
  return Date.parse(time) / 1000;
}

/** Smooth by an exponential mean. Its start is corrected, so that the first values are not pulled towards zero. */
export function smooth(values: number[], weight: number): number[] {
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

/** Describe a curve in one sentence, for readers who do not see it. */
export function summary(curve: Curve, show: (value: number) => string): string {
  const { points } = curve;
  const [first, last] = [points[0], points.at(-1)];
  if (!first || !last) return `${curve.name}: no points yet.`;
  const lowest = points.reduce((a, b) => (b.value < a.value ? b : a));
  const highest = points.reduce((a, b) => (b.value > a.value ? b : a));
  return (
    `${curve.name}: ${points.length} points from step ${first.step} to ${last.step}. ` +
    `First ${show(first.value)}, last ${show(last.value)}, lowest ${show(lowest.value)} at step ${lowest.step}, ` +
    `highest ${show(highest.value)} at step ${highest.step}.`
  );
}
