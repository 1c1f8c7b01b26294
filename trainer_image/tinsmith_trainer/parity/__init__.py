"""The parity gate: the same model, seed and data through two engines, step by step, side by side."""
