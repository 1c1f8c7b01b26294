"""`kubectl tinsmith`: inspect and manage TrainingSessions and SamplerPools with the user's own kubectl."""
