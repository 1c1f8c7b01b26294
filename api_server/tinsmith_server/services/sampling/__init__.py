"""Sampling sessions, and samples before they reach a sampler."""
