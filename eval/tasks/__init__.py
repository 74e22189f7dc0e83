"""Readers of official files. Nothing in this package imports torch, because recipes are validated with it."""
