"""Decides the `auto` settings of a layout: costs of the choices, heuristics, and decisions."""
