"""Attention and fused operations."""
