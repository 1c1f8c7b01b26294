"""Workers as TrainingSessions of a Kubernetes namespace: watched, connected to, and made from a catalogue."""
