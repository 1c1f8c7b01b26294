"""Workers in Kubernetes: TrainingSessions that this server watches, connects to, and creates from templates."""
