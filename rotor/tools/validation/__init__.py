"""Whether a compressed checkpoint keeps what it claims."""
