"""Ranks as processes: starts them, connects them, watches them, and ends them together when one fails."""
