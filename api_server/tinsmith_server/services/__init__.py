"""What requests mean. Services know the store and the fleet, and nothing of HTTP."""
