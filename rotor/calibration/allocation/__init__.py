"""Allocation turns spectra into ranks, and curves of loss into bits: each method gives an ordered path of plans.

Each method has a file with its path. `recipe/rank_methods.py` lists the methods of ranks by name and needs no torch.
"""
