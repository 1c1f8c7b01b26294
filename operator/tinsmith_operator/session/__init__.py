"""Pure: decides about a TrainingSession, from what is observed of it. The entry is `decision`."""
