"""Stands in for NFS in every Python process that has this folder in PYTHONPATH: see `nfs.py`, which switches it on.

Below NFS_STANDIN_ROOT a file that another host has made, or renamed into its place, comes into sight only after
NFS_STANDIN_SECONDS; until then it is missing, or the one that was there before is read. flock fails with ENOLCK.
What the server does is atomic: exclusive creation, link, rename and mkdir see what is really there. Content written
into a file that is in sight is seen when it is opened, as NFS promises (close to open).

The runner is a host, and every supervisor, with its worker, is one of its own: it has another name and another boot.
"""

import builtins
import errno
import fcntl
import hashlib
import io
import os
import shutil
import sys
import time

ROOT = os.path.realpath(os.environ["NFS_STANDIN_ROOT"]) if "NFS_STANDIN_ROOT" in os.environ else None
SECONDS = float(os.environ.get("NFS_STANDIN_SECONDS", "0"))
SERVER = os.environ.get("NFS_STANDIN_SERVER", "")
BOOT = "/proc/sys/kernel/random/boot_id"

if "flopwatch.sweep.supervisor" in sys.orig_argv and "NFS_STANDIN_HOST" in os.environ:
    os.environ["NFS_STANDIN_HOST"] = f"node-{os.getpid()}-{time.monotonic_ns()}"
HOST = os.environ.get("NFS_STANDIN_HOST", "login")

_real = {name: getattr(os, name) for name in ("open", "stat", "lstat", "listdir", "scandir", "rename", "replace")}
_real |= {name: getattr(os, name) for name in ("link", "mkdir", "uname")}
_io_open, _flock = io.open, fcntl.flock


def _place(path):
    """The path if it is on the stand-in."""
    if isinstance(path, int) or path is None:
        return None
    path = os.path.abspath(os.fsdecode(path))
    if "/slots" in path:  # where tests lock cores: it stands for a disk of this machine
        return None
    return path if path == ROOT or path.startswith(f"{ROOT}/") else None


def _note_file(path):
    return f"{SERVER}/{hashlib.sha1(path.encode()).hexdigest()}"


def _note(path, old=None):
    """The server remembers who put this name there, and when."""
    if place := _place(path):
        note = _note_file(place)
        if old is not None:
            _real["replace"](old, f"{note}.old")
        elif os.path.isfile(f"{note}.old"):
            os.unlink(f"{note}.old")
        beside = f"{note}.{os.getpid()}"
        with _io_open(beside, "w") as stream:
            stream.write(f"{HOST} {time.time()}")
        _real["replace"](beside, note)


def _is_hidden_itself(place):
    try:
        with _io_open(_note_file(place)) as stream:
            host, since = stream.read().split()
    except OSError:
        return False
    return host != HOST and time.time() - float(since) < SECONDS and not _exists(f"{_note_file(place)}.seen-{HOST}")


def _exists(path):
    try:
        _real["lstat"](path)
    except OSError:
        return False
    return True


def _is_hidden(path):
    """It or a folder above it."""
    place = _place(path)
    while place and place != ROOT:
        if _is_hidden_itself(place):
            return True
        place = os.path.dirname(place)
    return False


def _missing(path):
    return FileNotFoundError(errno.ENOENT, "not in sight yet (NFS stand-in)", os.fspath(path))


def _before(path):
    """What this host still sees in place of a file that was renamed over it; None when that was nothing."""
    old = f"{_note_file(_place(path))}.old"
    return old if _exists(old) and not _is_hidden(os.path.dirname(_place(path))) else None


def _looking(name):
    def look(path=".", *args, **kwargs):
        if not kwargs.get("dir_fd") and _is_hidden(path):
            old = _before(path)
            if old is None:
                raise _missing(path)
            return _real[name](old, *args, **kwargs)
        return _real[name](path, *args, **kwargs)

    return look


def _listdir(path="."):
    names = _real["listdir"](path)
    if _place(path) is None:
        return names
    if _is_hidden(path):
        raise _missing(path)
    return [name for name in names if not _is_hidden_itself(os.path.join(_place(path), os.fsdecode(name)))]


class _Scan:
    def __init__(self, path):
        self._entries = _real["scandir"](path)

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            entry = next(self._entries)
            if not _is_hidden_itself(os.path.abspath(entry.path)):
                return entry

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._entries.close()

    close = __exit__


def _scandir(path="."):
    return _Scan(path) if _place(path) else _real["scandir"](path)


def _os_open(path, flags, mode=0o777, **kwargs):
    if _place(path) is None:
        return _real["open"](path, flags, mode, **kwargs)
    if flags & os.O_CREAT:
        _need_parent(path)
        was_there = _exists(path)
        handle = _real["open"](path, flags, mode, **kwargs)
        if not was_there:
            _note(path)
        return handle
    if _is_hidden(path):
        old = _before(path)
        if old is None:
            raise _missing(path)
        return _real["open"](old, flags, mode, **kwargs)
    return _real["open"](path, flags, mode, **kwargs)


def _open(file, mode="r", *args, **kwargs):
    if file == BOOT or os.fspath(file) == BOOT if not isinstance(file, int) else False:
        return io.StringIO(HOST)
    if _place(file) is None:
        return _io_open(file, mode, *args, **kwargs)
    if set(mode) & set("wax"):
        _need_parent(file)
        was_there = _exists(file)
        stream = _io_open(file, mode, *args, **kwargs)
        if not was_there:
            _note(file)
        return stream
    if _is_hidden(file):
        old = _before(file)
        if old is None:
            raise _missing(file)
        return _io_open(old, mode, *args, **kwargs)
    return _io_open(file, mode, *args, **kwargs)


def _renaming(name):
    def rename(source, target, **kwargs):
        old = None
        place = _place(target)
        if place and os.path.isfile(place) and not _is_hidden_itself(place):
            old = f"{_note_file(place)}.{os.getpid()}.copy"
            shutil.copyfile(place, old)
        _real[name](source, target, **kwargs)
        if place:
            _note(target, old)

    return rename


def _need_parent(path):
    """A folder that is not in sight is none to put anything into."""
    if (place := _place(path)) and _is_hidden(os.path.dirname(place)):
        raise _missing(path)


def _link(source, target, **kwargs):
    _need_parent(target)
    _real["link"](source, target, **kwargs)
    _note(target)


def _mkdir(path, mode=0o777, **kwargs):
    _need_parent(path)
    try:
        _real["mkdir"](path, mode, **kwargs)
    except FileExistsError:
        if place := _place(path):  # the server's answer tells the client that it is there
            with _io_open(f"{_note_file(place)}.seen-{HOST}", "w"):
                pass
        raise
    _note(path)


def _no_flock(handle, operation):
    number = handle if isinstance(handle, int) else handle.fileno()
    if _place(os.readlink(f"/proc/self/fd/{number}")):
        raise OSError(errno.ENOLCK, "no locks available (NFS stand-in)")
    return _flock(handle, operation)


def _uname():
    real = _real["uname"]()
    return os.uname_result((real.sysname, HOST, real.release, real.version, real.machine))


if ROOT is not None:
    os.makedirs(SERVER, exist_ok=True)
    os.open, os.listdir, os.scandir, os.link, os.mkdir = _os_open, _listdir, _scandir, _link, _mkdir
    os.stat, os.lstat, os.rename, os.replace = (
        _looking("stat"),
        _looking("lstat"),
        _renaming("rename"),
        _renaming("replace"),
    )
    os.uname, fcntl.flock = _uname, _no_flock
    builtins.open = io.open = _open
