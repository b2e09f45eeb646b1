"""Recipes side by side: parts, records, tables, plots."""
