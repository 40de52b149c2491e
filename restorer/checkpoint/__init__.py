"""Process trees into images and back, by CRIU or runc."""
