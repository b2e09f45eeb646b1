"""What is on disk: layouts, the section in config.json, kernel configurations, schemas, publishing, locks."""
