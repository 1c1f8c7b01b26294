"""What prompts that begin alike have in common: kept for later ones, or shared by those under way."""
