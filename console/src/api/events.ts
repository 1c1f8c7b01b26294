/** Parse a stream of server-sent events that `fetch` reads. EventSource can send neither a body nor a header. */

export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const events = rest.replaceAll("\r\n", "\n").split("\n\n");
      rest = events.pop() ?? "";
      for (const event of events) {
        const data = dataOf(event);
        if (data !== "") yield data;
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function dataOf(event: string): string {
  return event
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart())
    .join("\n");
}
