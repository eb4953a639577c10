"""Pipeline schedules: orders of actions, simulated and chosen. Pure, except the recorder of a real step's timeline."""
