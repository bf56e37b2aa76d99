"""Programs that fetch public data."""
