"""A fork whose child belongs to the keeper: it is born as the sibling of the one who forks.

The kernel offers this (CLONE_PARENT) and Python does not, so it is asked for directly, between the same calls that
`os.fork` makes. Where the kernel refuses, a fork of a fork does it: the keeper is a subreaper and inherits the child.
"""

from __future__ import annotations

import ctypes
import os

_SYS_CLONE3 = 435  # the same number on every architecture
_PR_GET_TID_ADDRESS = 40
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x00008000, 0x00200000, 0x01000000

# Both hold the interpreter's lock during the call: the child must find it held.
_C = ctypes.PyDLL(None, use_errno=True)
_PYTHON = ctypes.pythonapi


class _CloneArgs(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("pidfd", ctypes.c_uint64),
        ("child_tid", ctypes.c_uint64),
        ("parent_tid", ctypes.c_uint64),
        ("exit_signal", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("stack_size", ctypes.c_uint64),
        ("tls", ctypes.c_uint64),
    )


def fork_for_keeper() -> int:
    """The child's pid in the caller, 0 in the child. Call it with one thread alive. Raises `OSError`.

    The child of the second way may still be its dying parent's for a moment: `settle_in` waits for that.
    """
    address = _tid_address()
    if address is not None:
        pid = _clone(address)
        if pid is not None:
            return pid
    return _fork_twice()


def _tid_address() -> int | None:
    """Where the C library keeps the thread's id; a child must find its own there."""
    found = ctypes.c_ulong(0)
    failed = _C.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(found), 0, 0, 0)
    return None if failed or not found.value else found.value


def _clone(address: int) -> int | None:
    """None when it cannot be had this way. The signal at its end is the one of the caller's own end."""
    asked = _CloneArgs(flags=_CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID, child_tid=address)
    size = ctypes.c_size_t(ctypes.sizeof(asked))
    _PYTHON.PyOS_BeforeFork()
    pid = int(_C.syscall(ctypes.c_long(_SYS_CLONE3), ctypes.byref(asked), size))
    if pid == 0:
        _PYTHON.PyOS_AfterFork_Child()
    else:
        _PYTHON.PyOS_AfterFork_Parent()
    return None if pid < 0 else pid


def _fork_twice() -> int:
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        return 0
    os.close(write)
    try:
        os.waitpid(middle, 0)
        text = os.read(read, 32)
    finally:
        os.close(read)
    if not text:
        raise OSError("the process could not be forked")
    return int(text)
