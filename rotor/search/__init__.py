"""The search for the plan that meets a goal, and the checkpoint that is written with it: `rotor.export`."""
