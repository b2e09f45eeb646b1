"""A compressed checkpoint on disk: layouts, families, files, and how bases become weights."""
