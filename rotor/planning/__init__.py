"""Inspection: what a model is to rotor, and what the commands would take."""
