"""Memory of a layout, by arithmetic on the counts."""
