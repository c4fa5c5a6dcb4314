"""What holds for every test."""

import signal

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
