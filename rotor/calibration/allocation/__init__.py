"""From spectra to ranks, and from curves of loss to bits: ordered paths of plans.

registry: the methods of ranks by name, as data; needs no torch. One method a file, each with its path.
"""
