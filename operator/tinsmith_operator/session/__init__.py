"""Pure decisions about a TrainingSession. The entry point is `decision`."""
