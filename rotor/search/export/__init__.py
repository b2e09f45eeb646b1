"""Writing a compressed checkpoint: every file, its card, and its weights where they were left out."""
