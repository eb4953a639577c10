"""A model to stages: pure planning, what crosses a cut, the stages themselves, and the runtime that drives them."""
