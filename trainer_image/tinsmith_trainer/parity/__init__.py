"""The parity gate, which runs the same model, seed and data through two engines and compares each step."""
