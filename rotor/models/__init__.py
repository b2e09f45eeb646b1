"""Source models of any size, run layer by layer, and the text and tokens that they read."""
