"""The conversion between messages of the wire and checked arrays. Training and sampling share this package."""
