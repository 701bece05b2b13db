"""What a trained model can do: sampling text from it."""
