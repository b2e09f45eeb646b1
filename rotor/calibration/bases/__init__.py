"""Bases of a group of KV heads: matrices that encode keys and values into latents, and decode the latents.

`recipe/basis_methods.py` describes the methods and needs no torch. Here each method has a file, with functions from
Inputs (second moments or weights of one layer, batched over its groups, in float64) to a BasisPair. A pair has all
columns in descending order of singular value; the first r columns serve rank r. `layer.py` lists the functions by
the names of the methods, and computes both bases of a layer.
"""
