"""Rotating queries and keys and projecting them onto their bases."""
