"""Sampling sessions, and samples on their way to a sampler."""
