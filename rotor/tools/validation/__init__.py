"""Checks that a compressed checkpoint keeps what it claims."""
