"""Workers as TrainingSessions of a Kubernetes namespace: watched, connected to, and created from a catalogue."""
