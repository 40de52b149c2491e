"""Code that runs inside engines, under their Python: the standard library and what the engine itself has, nothing of ours."""
