"""Messages of the wire to checked arrays, and back: training and sampling share them."""
