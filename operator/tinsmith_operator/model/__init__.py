"""What a TrainingSession says and shows: its spec, its status, its conditions and their reasons, typed."""
