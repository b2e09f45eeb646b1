"""`rotor gpu`: tests and measurements of a GPU within a few minutes, one process a job."""
