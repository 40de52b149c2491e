"""Starts, snapshots and the life of what runs here: everything that is done in an order, with its undo."""
