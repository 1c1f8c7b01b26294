import { describe, expect, it } from "vitest";
import { detailOf, remedyFor } from "../src/api/details";
import { eventsOf } from "../src/api/events";
import { pieceOf } from "../src/api/pieces";
import { hashOf, placeOf } from "../src/state/places";

async function read(...parts: string[]): Promise<string[]> {
  const encoder = new TextEncoder();
  const bytes = parts.map((part) => encoder.encode(part));
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      for (const one of bytes) controller.enqueue(one);
      controller.close();
    },
  });
  const found: string[] = [];
  for await (const data of eventsOf(body)) found.push(data);
  return found;
}

describe("a stream of events", () => {
  it("is the same, wherever the network cuts it", async () => {
    const text = 'data: {"a": 1}\n\n: keep-alive\n\ndata: two\r\n\r\ndata: [DONE]\n\n';
    for (let cut = 0; cut <= text.length; cut += 1) {
      expect(await read(text.slice(0, cut), text.slice(cut))).toEqual(['{"a": 1}', "two", "[DONE]"]);
    }
  });
});

describe("a piece of an answer", () => {
  it("has the text of a conversation or of a completion", () => {
    expect(pieceOf({ choices: [{ delta: { content: "Hel" } }] })).toEqual({ text: "Hel" });
    expect(pieceOf({ choices: [{ text: "lo", finish_reason: "length" }] })).toEqual({ text: "lo", finish: "length" });
    expect(pieceOf({ choices: [{ delta: { reasoning_content: "hm" } }] })).toEqual({ reasoning: "hm" });
  });

  it("may be the usage alone", () => {
    const usage = { prompt_tokens: 3, completion_tokens: 5 };
    expect(pieceOf({ choices: [], usage })).toEqual({ promptTokens: 3, answerTokens: 5 });
  });
});

describe("an error", () => {
  it("is shown in the server's words, in each of its forms", () => {
    expect(detailOf('{"detail": "there is no run x"}', 404)).toBe("there is no run x");
    expect(detailOf('{"error": {"message": "no model"}}', 404)).toBe("no model");
    expect(detailOf("<html>Bad gateway</html>", 502)).toBe("The server or a proxy before it answered with status 502.");
  });

  it("says what to do", () => {
    expect(remedyFor(503)).toContain("Try again");
    expect(remedyFor(500)).toContain("log");
    expect(remedyFor(400)).toBe("");
  });
});

describe("an address", () => {
  it("names a screen, an object with any characters, and parameters", () => {
    const id = "0f3b:train:0/ä?#%";
    const place = placeOf(hashOf("run", id, { left: "tinker://a/b&c" }));
    expect([place.screen, place.id, place.query.get("left")]).toEqual(["run", id, "tinker://a/b&c"]);
  });

  it("is the list of runs by default", () => {
    expect(placeOf("").screen).toBe("runs");
    expect(placeOf("#/").screen).toBe("runs");
  });
});
