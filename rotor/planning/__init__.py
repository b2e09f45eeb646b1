"""What a command would do and take, before it does: inspection and dry runs."""
