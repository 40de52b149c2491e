"""The command line: what `rewake …` does and prints."""
