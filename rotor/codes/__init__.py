"""Bits per channel: what the numbers of a latent are worth, how they are coded, and how the code is folded away.

fisher: what an error in keys and values costs. quantiser: the code of a channel and the error it leaves. allocation:
bits of every channel for a number of bytes. fold: scales and means into projections. A module here is mathematics; only
fisher runs a model.
"""
