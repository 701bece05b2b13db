"""Replicas: their gradients, and what they share out."""
