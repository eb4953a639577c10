"""A step over microbatches: actions in the schedule's order, messages to the neighbours, results joined."""
