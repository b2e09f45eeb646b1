"""`python -m rotor` is the `rotor` command."""

from .cli import main

main()
