/** The session of the console: who is logged in. The key itself is never stored. */

import { call, Refused, useToken, whenLoggedOut } from "../api/client";
import type { ConsoleSession } from "../api/types";

const SESSION = "console/session";
const RENEW_BEFORE_MS = 20 * 60_000;
const CHECK_EVERY_MS = 60_000;

class Session {
  who = $state.raw<ConsoleSession | null>(null);
  isChecked = $state(false);
  hasEnded = $state(false);

  constructor() {
    whenLoggedOut(() => this.#end());
    setInterval(() => void this.#renewInTime(), CHECK_EVERY_MS);
  }

  get isAdmin(): boolean {
    return this.who?.role === "admin";
  }

  /** The reason why this key cannot change anything, or null if it can. */
  get blocked(): string | null {
    return this.who?.role === "reader" ? "Your key has the role reader, which may only look." : null;
  }

  async resume(): Promise<void> {
    try {
      this.#begin(await call<ConsoleSession>("GET", SESSION, { keepsSession: true }));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
    } finally {
      this.isChecked = true;
    }
  }

  async login(key: string): Promise<void> {
    const headers = { "X-API-Key": key };
    this.#begin(await call<ConsoleSession>("POST", SESSION, { headers, keepsSession: true }));
  }

  async logout(): Promise<void> {
    await call("DELETE", SESSION, { keepsSession: true });
    this.#forget();
  }

  #begin(who: ConsoleSession): void {
    useToken(who.csrf_token);
    this.who = who;
    this.hasEnded = false;
  }

  #forget(): void {
    useToken("");
    this.who = null;
  }

  #end(): void {
    this.hasEnded = this.who !== null;
    this.#forget();
  }

  async #renewInTime(): Promise<void> {
    const end = this.who?.expires_at;
    if (!end || Date.parse(end) - Date.now() > RENEW_BEFORE_MS) return;
    try {
      this.#begin(await call<ConsoleSession>("POST", `${SESSION}/renew`));
    } catch {
      // A refusal ends the session, and the screen of the login says so. Without an answer, the next minute tries again.
    }
  }
}

export const session = new Session();
