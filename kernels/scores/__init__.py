"""How much attention each key draws: sums over queries, for caches that drop the keys that draw least."""
