"""Environments for groups: of functions, of `verifiers`, and two worked ones."""
