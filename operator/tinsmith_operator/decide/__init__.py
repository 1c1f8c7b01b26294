"""Pure: what is there, and what should be, to what is to be done."""
