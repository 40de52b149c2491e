"""What hosts tell each other through the store."""
