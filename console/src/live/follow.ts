/** Updates from the server: by server-sent events, or by polling where a proxy lets no events through. */

import { connection } from "../state/connection.svelte";
import { address } from "../api/client";

const RETRY_MS = 2000;
const POLL_MS = 3000;
const FAILURES_UNTIL_POLLING = 3;

export interface Source {
  /** The path of the events. It is asked for at each connection, because it has the position of the last point. */
  path: () => string;
  onEvent: (data: string) => void;
  /** Reads what is new, without events. */
  poll: () => Promise<void>;
}

/** Follow a source until the returned function is called. A hidden page is not updated. */
export function follow(source: Source): () => void {
  let events: EventSource | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let failures = 0;
  let hasConnected = false;
  let stopped = false;

  const later = (call: () => void, milliseconds: number): void => {
    clearTimeout(timer);
    timer = setTimeout(call, milliseconds);
  };
  const close = (): void => {
    events?.close();
    events = null;
    clearTimeout(timer);
  };
  const poll = async (): Promise<void> => {
    try {
      await source.poll();
    } catch {
      // The call itself has reported the loss; the next poll tries again.
    }
    if (!stopped && !document.hidden) later(() => void poll(), POLL_MS);
  };
  const connect = (): void => {
    close();
    if (stopped || document.hidden) return;
    if (failures >= FAILURES_UNTIL_POLLING) {
      void poll();
      return;
    }
    const sentAt = performance.now();
    events = new EventSource(address(source.path()));
    events.onopen = () => {
      failures = 0;
      connection.restore(sentAt);
      // Nothing was sent while there was no connection.
      if (hasConnected) void source.poll().catch(() => undefined);
      hasConnected = true;
    };
    events.onmessage = (event: MessageEvent<string>) => source.onEvent(event.data);
    events.onerror = () => {
      failures += 1;
      close();
      // One poll tells a lost server from a refused stream.
      void source.poll().catch(() => undefined);
      later(connect, RETRY_MS);
    };
  };
  const onVisibility = (): void => (document.hidden ? close() : connect());

  document.addEventListener("visibilitychange", onVisibility);
  connect();
  return () => {
    stopped = true;
    close();
    document.removeEventListener("visibilitychange", onVisibility);
  };
}

/** Call `poll` now and then every few seconds while the page is visible. */
export function repeat(poll: () => Promise<void>, milliseconds = POLL_MS): () => void {
  let stopped = false;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const turn = async (): Promise<void> => {
    if (!document.hidden) await poll().catch(() => undefined);
    if (!stopped) timer = setTimeout(() => void turn(), milliseconds);
  };
  void turn();
  return () => {
    stopped = true;
    clearTimeout(timer);
  };
}
