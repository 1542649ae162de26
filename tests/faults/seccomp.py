"""A seccomp filter that refuses system calls as old container profiles (EPERM) and old kernels
(ENOSYS) do."""

from __future__ import annotations

import ctypes
import platform
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
PIDFDS = (424, 434)
MEMFD_CREATE = (319 if platform.machine() == "x86_64" else 279,)
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000


def refuse(error: int, *calls: int) -> None:
    """For `preexec_fn`: make these system calls return `error` for this process and its
    children."""
    compare = [(_EQUAL, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),
            *compare,
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ERRNO | error),
        )
    )
    memory = ctypes.create_string_buffer(program)
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(memory))
    )
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(header)), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "no seccomp filter")
