"""Pure decisions about a TrainingSession. The entry is `decision`."""
