"""The services behind the routes. They use the store and the fleet, and know nothing of HTTP."""
