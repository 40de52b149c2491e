"""A whole installation on one machine, as `rewake up` runs it: its processes, its sockets, its folders."""
