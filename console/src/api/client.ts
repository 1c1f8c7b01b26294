/** Calls to the server, below the folder that contains the console. */

import { connection } from "../state/connection.svelte";
import { detailOf, remedyFor } from "./details";

/** The server refused a call. `detail` is its sentence, and `remedy` is what the reader can do. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    readonly detail: string,
  ) {
    super(detail);
  }

  get remedy(): string {
    return remedyFor(this.status);
  }
}

/** No answer came. The banner of the page says so, and the page tries again. */
export class ConnectionLost extends Error {}

export const root = new URL("..", document.baseURI);

let csrfToken = "";
let onLogout: () => void = () => undefined;

export function useToken(token: string): void {
  csrfToken = token;
}

/** Set the function that is called when the server no longer accepts the session. */
export function whenLoggedOut(call: () => void): void {
  onLogout = call;
}

export function address(path: string): string {
  return new URL(path, root).href;
}

interface Options {
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
  keepsSession?: boolean;
}

/** Send a call and return the response if the server accepted it. Throws Refused and ConnectionLost. */
export async function send(method: string, path: string, options: Options = {}): Promise<Response> {
  const headers: Record<string, string> = { Accept: "application/json", ...options.headers };
  if (method !== "GET") headers["X-CSRF-Token"] = csrfToken;
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  let response: Response;
  const sentAt = performance.now();
  connection.calls += 1;
  try {
    response = await fetch(address(path), {
      method,
      headers,
      credentials: "same-origin",
      cache: "no-store",
      body: options.body === undefined ? null : JSON.stringify(options.body),
      signal: options.signal ?? null,
    });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    connection.lose();
    throw new ConnectionLost("The server does not answer.");
  } finally {
    connection.calls -= 1;
  }
  connection.restore(sentAt);
  if (response.ok) return response;
  const refused = new Refused(response.status, detailOf(await response.text(), response.status));
  if (response.status === 401 && !options.keepsSession) onLogout();
  throw refused;
}

export async function call<T>(method: string, path: string, options: Options = {}): Promise<T> {
  const response = await send(method, path, options);
  return (response.status === 204 ? undefined : await response.json()) as T;
}

export function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return call<T>("GET", path, signal ? { signal } : {});
}

export function segment(text: string): string {
  return encodeURIComponent(text);
}
