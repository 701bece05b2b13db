"""Weights in and out: folders of Hugging Face become run directories, and the reverse."""
