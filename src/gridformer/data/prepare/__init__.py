"""Turns text into token folders."""
