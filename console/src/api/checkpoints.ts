/** Changes of checkpoints and of promoted names. */

import { call, segment } from "./client";
import type { Checkpoint, Promotion } from "./types";

/** Return the parts of `tinker://<run>/<kind>/<name>`. */
export function partsOf(path: string): { run: string; kind: string; name: string } {
  const [run = "", kind = "", ...name] = path.replace("tinker://", "").split("/");
  return { run, kind, name: name.join("/") };
}

function addressOf(path: string): string {
  const { run, kind, name } = partsOf(path);
  return `api/v1/training_runs/${segment(run)}/checkpoints/${segment(kind)}/${segment(name)}`;
}

export function setTtl(checkpoint: Checkpoint, seconds: number | null): Promise<void> {
  return call("PUT", `${addressOf(checkpoint.tinker_path)}/ttl`, { body: { ttl_seconds: seconds } });
}

export function setPublic(checkpoint: Checkpoint, isPublic: boolean): Promise<void> {
  return call(isPublic ? "POST" : "DELETE", `${addressOf(checkpoint.tinker_path)}/publish`);
}

export function remove(checkpoint: Checkpoint): Promise<void> {
  return call("DELETE", addressOf(checkpoint.tinker_path));
}

export function promote(name: string, path: string): Promise<Promotion> {
  return call("PUT", `api/v1/promotions/${segment(name)}`, { body: { model_path: path } });
}

export function rollBack(promotion: Promotion): Promise<Promotion> {
  return call("POST", `api/v1/promotions/${segment(promotion.name)}/rollback?expected_number=${promotion.number}`);
}

export function removeName(promotion: Promotion): Promise<void> {
  return call("DELETE", `api/v1/promotions/${segment(promotion.name)}`);
}
