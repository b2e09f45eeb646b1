"""Planning before any weights are read: the form of a model's layers, memory and disk of the work, `rotor inspect`."""
