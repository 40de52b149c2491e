"""The namespaces that engines live in: made, connected, ended."""
