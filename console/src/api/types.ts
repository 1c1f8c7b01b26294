/** The server's answers, by the names that the console uses. `make console` generates the schemas from the server. */

import type { components } from "./schema";

/** A field without a value is missing in the server's answers, so null does not occur there. */
type Answered<T> = T extends (infer Item)[]
  ? Answered<Item>[]
  : T extends object
    ? { [Name in keyof T]: Answered<undefined extends T[Name] ? Exclude<T[Name], null> : T[Name]> }
    : T;

export type Role = KeyEntry["role"];
type KeyEntry = components["schemas"]["KeyEntry"];

/** The session of the console. The document of the API leaves its calls out, because only the console makes them. */
export interface ConsoleSession {
  tenant: string;
  role: Role;
  key_name: string;
  csrf_token: string;
  expires_at: string | null;
}

export type Run = Answered<components["schemas"]["TrainingRunResponse"]>;
export type RunState = Run["state"];
export type Runs = Answered<components["schemas"]["TrainingRunsResponse"]>;
export type Step = Answered<components["schemas"]["RunStepResponse"]>;
export type Reported = Answered<components["schemas"]["RunReportResponse"]>;
export type Metrics = Answered<components["schemas"]["RunMetricsResponse"]>;
export type Checkpoint = Answered<components["schemas"]["CheckpointResponse"]>;
export type CheckpointPage = Answered<components["schemas"]["CheckpointsResponse"]>;
export type Promotion = components["schemas"]["PromotionResponse"];
export type Promotions = components["schemas"]["PromotionsResponse"];
export type WaitingModel = components["schemas"]["WaitingModel"];
export type WaitingModels = components["schemas"]["WaitingModelsResponse"];
export type Usage = Answered<components["schemas"]["UsageResponse"]>;
export type UsageEvent = Usage["data"][number];
export type UsageInfo = UsageEvent["event_info"];
export type Key = KeyEntry;
export type Keys = components["schemas"]["KeysResponse"];
export type NewKey = components["schemas"]["NewKeyResponse"];
export type Tenant = components["schemas"]["TenantEntry"];
export type Tenants = components["schemas"]["TenantsResponse"];
export type Limits = components["schemas"]["TenantLimitsResponse"];
export type LimitName = keyof Limits;
export type Worker = components["schemas"]["WorkerEntry"];
export type Workers = components["schemas"]["WorkersResponse"];
