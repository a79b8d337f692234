"""A module that ends the process that loads it, as a lack of memory would."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
