"""The part of Miles that Tinsmith uses, on a CPU. `../../assumptions.toml` says what it takes Miles to do."""
