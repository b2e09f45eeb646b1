"""Attention of many new queries, causal, tile by tile."""
