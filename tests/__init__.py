"""The tests, and what else is run from here: ``python -m tests.matrix`` and its like."""

import signal

# Ignored by a shell's job in the background, and then by each client that it starts: no
# Ctrl-C would reach one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
