"""Processes as /proc shows them."""
