"""GPUs, by a process of its own that speaks to the driver."""
