"""The logs of a run: on the console, in files, and in services that draw curves."""
