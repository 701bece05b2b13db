"""The largest values of numbers and names that a user may give."""

from __future__ import annotations

from typing import Final

# Numbers of keys with no bound of their own. Up to 2^53 an integer is exact as a float, too, which
# schedules compute with; a float of up to 1e30 can be squared and added up.
LARGEST_INTEGER: Final = 2**53
LARGEST_FLOAT: Final = 1e30

# Sizes of a model. Each is far above any model, and with them every size of a tensor is computed in
# 64 bits and everything that grows with layers or processes takes seconds.
MOST_LAYERS: Final = 1024
WIDEST: Final = 2**24  # features of a layer
MOST_TOKENS: Final = 2**31 - 1  # of a vocabulary or a sequence: what a 32-bit index can count
MOST_IDS: Final = 2**24  # of a tokenizer: the largest vocabularies have a million
MOST_PROCESSES: Final = 2**20

LONGEST_NAME: Final = 200  # of a file: most file systems allow 255 bytes, and prefixes are added
LONGEST_PART: Final = 255  # bytes between two slashes of a path
LONGEST_PATH: Final = 4095
ESTIMATED_TOKENS: Final = 8192  # of a sequence at most, in estimates if nothing says how many
