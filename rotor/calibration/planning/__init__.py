"""What a model is to rotor: the form of its layers, what work on it takes, and all of it for `rotor inspect`."""
