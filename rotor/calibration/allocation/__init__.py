"""Allocation turns spectra into ranks, and curves of loss into bits: each method gives an ordered path of plans.

Each method has a file with its path, which `paths.py` lists. `recipe/rank_methods.py` describes the methods of ranks
and needs no torch.
"""
