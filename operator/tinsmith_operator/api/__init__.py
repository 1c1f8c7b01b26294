"""What a TrainingSession or SamplerPool says and shows: spec, status, conditions and their reasons, typed."""
