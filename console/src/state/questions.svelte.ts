/** The dialog that asks before a change. One dialog of the page shows the question. */

export interface Question {
  title: string;
  text: string;
  action: string;
  isDangerous?: boolean;
  /** Makes the change. If it throws, the dialog stays open and shows the error. */
  run: (value: string) => Promise<void>;
  /** A value that the reader types or chooses. */
  field?: { label: string; value: string; hint?: string; options?: { value: string; label: string }[] };
}

class Questions {
  open = $state.raw<Question | null>(null);

  ask(question: Question): void {
    this.open = question;
  }

  close(): void {
    this.open = null;
  }
}

export const questions = new Questions();
