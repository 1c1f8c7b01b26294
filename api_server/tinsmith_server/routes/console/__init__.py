"""The console's own calls: its session, its cookie, and its files."""
