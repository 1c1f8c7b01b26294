"""Pure: what is there around a TrainingSession, to what is to be done. The entry is `decision`."""
