"""From a model and a recipe to a run folder: tokens, capture, moments, bases."""
