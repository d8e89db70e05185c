"""Hardware counters of a device: what the driver counts, beside what flopwatch counts."""
