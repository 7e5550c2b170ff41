"""What other libraries print at each start and what is known to be harmless: it is left out.

Standard error goes through a process, line by line: a text without a newline waits for its end.
"""

import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# vLLM's CPU build: it binds its memory, and it needs no Triton.
HARMLESS = "NUMA binding: Using MEMBIND|doesn't include CPU backend"


@contextmanager
def harmless_left_out() -> Iterator[None]:
    """Standard error without these lines; all others come through, those of C++ too."""
    warnings.filterwarnings("ignore", ".*torch.distributed.reduce_op. is deprecated")
    try:
        terminal = os.dup(2)
        # A process of its own: what is printed before a crash arrives, and no signal reaches it.
        # -a: also what is no text.
        filtered = subprocess.Popen(["grep", "-aEv", "--line-buffered", HARMLESS],
                                    stdin=subprocess.PIPE, stdout=terminal, start_new_session=True)
    except OSError:  # standard error is closed, or there is no grep
        yield
        return
    os.dup2(filtered.stdin.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        filtered.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # a process that was started may hold the pipe
            filtered.wait(1)
