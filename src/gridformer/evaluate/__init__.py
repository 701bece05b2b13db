"""Uses a trained model: samples text, fills in blanks, and searches with beams."""
