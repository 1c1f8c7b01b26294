"""The typed spec, status and conditions of TrainingSessions and SamplerPools."""
