"""Lets Ctrl-C raise KeyboardInterrupt again in processes that were started with it ignored.

The server of worker processes loads it last: until then, Ctrl-C would print where in its imports it
is, and the command that the user stops ends the server anyway.
"""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
