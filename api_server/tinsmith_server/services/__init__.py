"""The services behind the routes. Services use the store and the fleet, and know nothing of HTTP."""
