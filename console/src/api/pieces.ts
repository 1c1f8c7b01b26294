/** The pieces of a streamed answer. */

export interface Piece {
  text?: string;
  reasoning?: string;
  finish?: string;
  promptTokens?: number;
  answerTokens?: number;
  asText?: boolean;
}

export interface Chunk {
  choices: {
    delta?: { content?: string | null; reasoning_content?: string | null };
    text?: string;
    finish_reason?: string | null;
  }[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
  error?: { message: string };
}

export function pieceOf(chunk: Chunk): Piece {
  const piece: Piece = {};
  const choice = chunk.choices[0];
  const text = choice?.delta?.content ?? choice?.text;
  if (text) piece.text = text;
  if (choice?.delta?.reasoning_content) piece.reasoning = choice.delta.reasoning_content;
  if (choice?.finish_reason) piece.finish = choice.finish_reason;
  if (chunk.usage) {
    piece.promptTokens = chunk.usage.prompt_tokens;
    piece.answerTokens = chunk.usage.completion_tokens;
  }
  return piece;
}
