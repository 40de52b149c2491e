"""Rewake's vocabulary and its decisions.

This package is the one thing the gateway and the restorer both import. A file belongs here when it is pure (no I/O, no
clock, no randomness, no logging; ``now`` and facts are arguments) *and* either both processes use it or an operator
would tune it. Policies return verdicts with reasons; they raise only for bugs.
"""
