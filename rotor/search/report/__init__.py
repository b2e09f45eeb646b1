"""One HTML file of a run or a checkpoint."""
