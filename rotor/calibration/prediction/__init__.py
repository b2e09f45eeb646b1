"""Prediction of the cost of a decode step on a device: bytes, instructions and seconds."""
