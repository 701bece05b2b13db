"""Loads what a trace needs, for the server from which the processes of traces are forked."""

import gridformer.record.ranks  # noqa: F401
