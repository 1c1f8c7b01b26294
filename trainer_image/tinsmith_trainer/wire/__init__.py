"""The messages of the wire as checked arrays, and back. Training and sampling share them."""
