"""The one exception of the test cluster."""

from __future__ import annotations


class ClusterError(Exception):
    """Something about the test cluster did not work; the message says what, and what to do."""
