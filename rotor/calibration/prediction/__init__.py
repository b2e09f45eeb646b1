"""Prediction of the cost of a decode step on a device (bytes, instructions, seconds), and of a prompt (products)."""
