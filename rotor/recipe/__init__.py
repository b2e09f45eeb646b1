"""Recipes: what to sample, which bases to compute, how ranks are chosen, and how accuracy is measured.

A recipe is a YAML file read into frozen dataclasses. Every key is checked: an unknown one is an error that names the
nearest known key. Any field can be overridden by its dotted name (`tokens.count=16384`).
"""
