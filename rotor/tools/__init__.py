"""Tools around calibration and export: studies, validation, benchmarks, generation."""
