"""What the server tells of itself and of the base models that it has."""
