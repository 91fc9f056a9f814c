"""Turning matches into graphs."""
