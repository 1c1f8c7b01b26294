/** The screen that the address names. */

import { hashOf, placeOf, type Place } from "./places";

class Router {
  place = $state.raw<Place>(placeOf(location.hash));

  constructor() {
    addEventListener("hashchange", () => (this.place = placeOf(location.hash)));
  }

  /** Change the parameters without a new entry in the browser's history. */
  replaceQuery(query: Record<string, string>): void {
    const hash = hashOf(this.place.screen, this.place.id, query);
    history.replaceState(history.state, "", hash);
    this.place = placeOf(hash);
  }
}

export const router = new Router();
