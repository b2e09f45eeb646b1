"""Text and tokens: what calibration reads and what accuracy is measured on."""
