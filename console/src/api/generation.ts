/** One streamed answer of a model, by the server's OpenAI endpoint. */

import { Refused, send } from "./client";
import { eventsOf } from "./events";
import { pieceOf, type Chunk, type Piece } from "./pieces";

export interface Question {
  model: string;
  system: string;
  prompt: string;
  temperature: number;
  maxTokens: number;
  seed: number | null;
}

const WITHOUT_TEMPLATE = /no chat template/i;

/** Yield the pieces of an answer. A model without a chat template continues the prompt as a text. */
export async function* generate(question: Question, signal: AbortSignal): AsyncGenerator<Piece> {
  let response: Response;
  try {
    response = await ask("oai/api/v1/chat/completions", chatBody(question), signal);
  } catch (error) {
    if (!(error instanceof Refused) || !WITHOUT_TEMPLATE.test(error.detail)) throw error;
    yield { asText: true };
    response = await ask("oai/api/v1/completions", textBody(question), signal);
  }
  if (response.body === null) throw new Refused(502, "The answer has no body.");
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error) throw new Refused(500, chunk.error.message);
    yield pieceOf(chunk);
  }
}

function ask(path: string, body: unknown, signal: AbortSignal): Promise<Response> {
  return send("POST", path, { body, signal });
}

function common(question: Question) {
  return {
    model: question.model,
    stream: true,
    stream_options: { include_usage: true },
    temperature: question.temperature,
    max_tokens: question.maxTokens,
    ...(question.seed === null ? {} : { seed: question.seed }),
  };
}

function chatBody(question: Question) {
  const system = question.system.trim() ? [{ role: "system", content: question.system }] : [];
  return { ...common(question), messages: [...system, { role: "user", content: question.prompt }] };
}

function textBody(question: Question) {
  const system = question.system.trim() ? `${question.system}\n\n` : "";
  return { ...common(question), prompt: `${system}${question.prompt}` };
}
