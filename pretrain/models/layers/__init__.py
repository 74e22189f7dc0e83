"""Layers, losses and base classes that the families share."""
