"""Environments for groups, made from functions or from `verifiers`."""
