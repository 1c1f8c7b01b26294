/** How long a run still takes. */

import type { Run } from "../api/types";

const SILENT_MS = 2 * 60_000;

/** Return the seconds that are left, or undefined if they are unknown, or if the run has stopped without saying so. */
export function secondsLeft(run: Run, now: number): number | undefined {
  const { eta_seconds: left, last_step_at: last } = run.progress ?? {};
  if (left === undefined || last === undefined || (run.state !== "ready" && run.state !== "parked")) return undefined;
  return now - Date.parse(last) > Math.max(SILENT_MS, left * 1000) ? undefined : left;
}
