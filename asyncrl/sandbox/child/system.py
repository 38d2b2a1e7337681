"""Calls functions of the C library."""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def call(function: str, *arguments: object) -> None:
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
