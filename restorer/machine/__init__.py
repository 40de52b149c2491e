"""This host: its facts, what it has to work with, what fits it."""
