"""What a run tells while it goes on: on the console, in files, and at the services that draw curves."""
