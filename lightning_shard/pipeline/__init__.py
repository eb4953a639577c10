"""Pipeline parallelism: placement and schedules (pure), the dataflow between stages, the stages, and their runtime."""
