/** The settings in which runs differ. */

import { count, measure, moment } from "../format";
import type { Run } from "../api/types";

export interface SettingRow {
  name: string;
  values: string[];
  differs: boolean;
}

const FIXED: { name: string; of: (run: Run) => string }[] = [
  { name: "Base model", of: (run) => run.base_model },
  { name: "LoRA rank", of: (run) => String(run.lora_rank) },
  { name: "State", of: (run) => run.state },
  { name: "Step", of: (run) => count(run.progress?.step) },
  { name: "Last loss", of: (run) => measure(run.progress?.loss) },
  { name: "Created", of: (run) => moment(run.created_at) },
];

/** Return the metadata of a run without the entries that the server itself reads. */
export function ownMetadata(run: Run | undefined): [string, string][] {
  return Object.entries(run?.user_metadata ?? {}).filter(([name]) => !name.startsWith("tinsmith-"));
}

/** Return one row for each fact and each entry of the runs' metadata. */
export function settingRows(runs: Run[]): SettingRow[] {
  const names = [...new Set(runs.flatMap((run) => ownMetadata(run).map(([name]) => name)))].sort();
  const metadata = names.map((name) => ({ name, of: (run: Run) => run.user_metadata?.[name] ?? "" }));
  return [...FIXED, ...metadata].map(({ name, of }) => {
    const values = runs.map(of);
    return { name, values, differs: new Set(values).size > 1 };
  });
}
