"""Time of a step on a device, by arithmetic on the counts."""
