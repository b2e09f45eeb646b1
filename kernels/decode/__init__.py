"""Attention of a few new queries over a long cache, its keys split over programs."""
