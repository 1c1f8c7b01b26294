"""What can go wrong, in one sentence each."""


class ImageError(Exception):
    """`str(error)` says what happened, to what, and what to do."""
