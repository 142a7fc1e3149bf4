"""Exact nearest neighbors."""
