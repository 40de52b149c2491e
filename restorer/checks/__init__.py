"""What `rewake doctor` tries."""
