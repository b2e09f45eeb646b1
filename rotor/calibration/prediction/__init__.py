"""What decoding costs on a device: bytes, FLOPs, seconds, and how evenly a schedule loads it."""
