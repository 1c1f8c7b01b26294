/** The answer of one model to one prompt, while it grows. */

import { generate, type Question } from "../api/generation";

export class Conversation {
  model = $state("");
  text = $state("");
  reasoning = $state("");
  finish = $state("");
  isText = $state(false);
  isRunning = $state(false);
  promptTokens = $state<number | null>(null);
  answerTokens = $state<number | null>(null);
  seconds = $state<number | null>(null);
  error = $state.raw<Error | null>(null);
  #abort: AbortController | null = null;

  async ask(question: Question): Promise<void> {
    this.clear();
    this.model = question.model;
    this.isRunning = true;
    const abort = new AbortController();
    this.#abort = abort;
    const started = performance.now();
    try {
      for await (const piece of generate(question, abort.signal)) {
        this.text += piece.text ?? "";
        this.reasoning += piece.reasoning ?? "";
        this.finish = piece.finish ?? this.finish;
        this.isText ||= piece.asText ?? false;
        this.promptTokens = piece.promptTokens ?? this.promptTokens;
        this.answerTokens = piece.answerTokens ?? this.answerTokens;
      }
    } catch (error) {
      if (abort.signal.aborted) this.finish = "stopped";
      else this.error = error as Error;
    } finally {
      if (this.#abort === abort) {
        this.seconds = (performance.now() - started) / 1000;
        this.isRunning = false;
      }
    }
  }

  stop(): void {
    this.#abort?.abort();
  }

  clear(): void {
    this.stop();
    this.#abort = null;
    this.model = this.text = this.reasoning = this.finish = "";
    this.isText = this.isRunning = false;
    this.promptTokens = this.answerTokens = this.seconds = null;
    this.error = null;
  }
}
