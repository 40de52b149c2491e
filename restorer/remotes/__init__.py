"""Copies of snapshots outside this host."""
