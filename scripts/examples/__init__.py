"""Examples beside the package."""
