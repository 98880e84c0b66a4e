"""Runs a command of the program on a pseudo-terminal, types keys into it, and returns what it showed."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable

from qed.cli import app

CONTROL_C = b"\x03"
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # that move the cursor, erase and colour


def _child(call: list[str], width: int) -> None:
    """Run the command where a fork has given it a terminal as its input and output."""
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)
    os.environ |= {"TERM": "xterm-256color", "TOKENIZERS_PARALLELISM": "false"}  # its threads do not survive a fork
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    status = 70  # of a program that failed in another way than by leaving
    try:
        app(call)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0
    finally:
        os._exit(status)


def on_terminal(
    call: list[str], *, width: int, interrupt: Callable[[str], bool] = lambda shown: False
) -> tuple[int, str]:
    """Return the status of a command and all that it wrote on a terminal of so many columns.

    Args:
        call: the words of the command, without `qed`.
        width: columns of the terminal.
        interrupt: called with what was written so far; Ctrl-C is typed once, when it returns True.
    """
    process, terminal = pty.fork()
    if process == 0:
        _child(call, width)
    written, typed = b"", False
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        written += part
        if not typed and interrupt(written.decode(errors="replace")):
            os.write(terminal, CONTROL_C)
            typed = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), written.decode()


def lines(written: str) -> list[str]:
    """Every state in which a line of the terminal was, without colours."""
    return [line for line in re.split(r"[\r\n]+", CODES.sub("", written)) if line]
