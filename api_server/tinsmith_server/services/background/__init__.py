"""What runs beside requests, and how this replica and its workers are doing."""
