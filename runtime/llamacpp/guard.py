"""Runs a program for as long as standard input stays open: `python guard.py PROGRAM ARGUMENTS…`.

The process that started it holds the other end of the pipe. When that ends, however it ends, the pipe closes and the
program is stopped. Only the standard library is used, so that this starts in a few milliseconds.
"""

import os
import signal
import subprocess
import sys
import threading

PATIENCE = 5.0
"""Seconds that the program is given to end by itself."""


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # an interrupt goes to the whole group; here the pipe decides
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def wait_for_end() -> None:
        while os.read(0, 4096):
            pass
        child.terminate()
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=wait_for_end, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
