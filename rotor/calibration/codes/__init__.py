"""Codes of channels: how the numbers of a latent are quantised, and what their errors cost.

`quantiser.py` fits the code of a channel and measures its error, `layer.py` does so for all channels of a layer.
`calibration/allocation` then chooses each channel's bits.
"""
