"""As much of Miles as Tinsmith uses, on a CPU. What it takes Miles to do is in `../../assumptions.toml`."""
