"""The stages of one rank: a module cut in place, with stand-ins for the blocks of other ranks."""
