"""Source models of any size: their files, where they come from, and running them layer by layer."""
