"""Bits per channel: what the numbers of a latent are worth, and how they are coded.

quantiser: the code of a channel and the error it leaves. layer: the codes of a layer. allocation: bits of every channel
for a number of bytes. All of it is mathematics.
"""
