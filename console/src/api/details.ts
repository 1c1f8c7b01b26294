/** The sentences of errors. */

/** Return the sentence of an error's body, in the form of this server or of OpenAI. */
export function detailOf(text: string, status: number): string {
  try {
    const body = JSON.parse(text) as { detail?: unknown; error?: { message?: unknown } };
    if (typeof body.detail === "string") return body.detail;
    if (typeof body.error?.message === "string") return body.error.message;
  } catch {
    // A proxy answers with a page of its own.
  }
  return `The server or a proxy before it answered with status ${status}.`;
}

const REMEDIES: Record<number, string> = {
  401: "Log in again with a valid key.",
  403: "Ask an administrator for a key with another role, or log in with one.",
  404: "It may have been removed. Reload the list.",
  410: "It has been removed and cannot be restored.",
  413: "Send less in one call.",
  429: "Wait a moment, then try again.",
  503: "A worker or the store is starting or unreachable. Try again in a moment.",
  507: "Delete checkpoints, or ask an administrator for more space.",
};

/** Return what the reader can do after a refusal. */
export function remedyFor(status: number): string {
  return REMEDIES[status] ?? (status >= 500 ? "The server's log has more about this error." : "");
}
