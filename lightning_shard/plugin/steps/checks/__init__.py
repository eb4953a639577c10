"""What would be silently wrong on a layout: found in the first steps, and refused or warned of."""
