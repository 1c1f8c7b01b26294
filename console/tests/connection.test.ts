import { expect, it } from "vitest";
import { connection } from "../src/state/connection.svelte";

it("a lost connection is back with the answer to a later call, which makes missed calls once more", () => {
  const before = performance.now() - 1;
  let made = 0;
  connection.lose();
  connection.whenRestored(() => (made += 1));
  connection.restore(before);
  expect([connection.isLost, made]).toEqual([true, 0]);
  connection.restore(performance.now());
  connection.restore(performance.now());
  expect([connection.isLost, made]).toEqual([false, 1]);
});
