"""A module cut to the stages of one rank, and what stands in for the blocks of others."""
