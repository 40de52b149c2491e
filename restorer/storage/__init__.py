"""Snapshots and weights on this host's disks: whole, unchanged, trusted, kept or removed."""
