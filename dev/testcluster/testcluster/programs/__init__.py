"""Builds of a cluster's programs from Go modules, and archives of images."""
