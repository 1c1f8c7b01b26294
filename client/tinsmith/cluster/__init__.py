"""`kubectl tinsmith`: TrainingSessions and SamplerPools, seen and handled with the user's own kubectl."""
