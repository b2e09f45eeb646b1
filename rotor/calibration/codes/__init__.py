"""Bits per channel: what the numbers of a latent are worth, how they are coded, and how the code is folded away.

quantiser: the code of a channel and the error it leaves. layer: the codes of a layer. allocation: bits of every channel
for a number of bytes. fold: scales and means into projections. All of it is mathematics.
"""
