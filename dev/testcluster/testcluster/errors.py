"""The exception of the test cluster."""

from __future__ import annotations


class ClusterError(Exception):
    """An error of the test cluster. The message says what failed, and what to do."""
