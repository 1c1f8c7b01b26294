"""Who used what, and when: taken from workers, written down, told to its tenant."""
