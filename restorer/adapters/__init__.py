"""Engines by kind: how each is started, asked, put to sleep and proven."""
