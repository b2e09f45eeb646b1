"""Bases of a group of KV heads: what turns keys and values into latents, and what reads the latents back.

registry: the methods by name, as data; needs no torch. The others compute: one method a file, each a function from
Inputs (second moments or weights of one layer, batched over its groups, in float64) to a BasisPair of all columns in
descending order of singular value; the first r columns serve rank r. layer: both bases of a layer.
"""
