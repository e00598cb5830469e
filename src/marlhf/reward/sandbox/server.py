"""The fork server: a small Python that has left the host behind and forks once for each program.

It never sees a program, its input or its output: those lie in descriptors that it passes on, so
that nothing of one program is left for the next to find. It stops when the host closes its socket
or is gone, and its programs with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from marlhf.reward.sandbox import kernel, landlock, namespaces, program, seccomp
from marlhf.reward.sandbox.program import Cage

TMP_MB = 64


def main(settings: dict[str, Any]) -> None:
    host = socket.socket(fileno=settings["socket"])
    try:
        alive = kernel.open_process(settings["host"])
        if os.getppid() != settings["host"]:
            return
        _preload(settings)
        cage, layers = _build_cage(settings)
    except Exception as error:
        host.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    if cage.namespaced:
        inner = os.fork()  # the first process of the PID namespace; when it ends, all in it end
        if inner:
            host.close()
            os.close(alive)
            os.waitpid(inner, 0)
            return
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if cage.namespaced:
            namespaces.build_root(settings["readable"])
    except Exception as error:
        host.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    host.send(json.dumps({"layers": layers}).encode())
    _serve(host, alive, cage)


def _preload(settings: dict[str, Any]) -> None:
    sys.path[:] = [path for path in sys.path if os.path.isdir(path)]
    sys.path += [path for path in settings["packages"] if path not in sys.path]
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, programs die and not the training
    for name in settings["preload"]:
        with suppress(ImportError):
            importlib.import_module(name)
    os.environ.clear()
    sys.path_importer_cache.clear()


def _build_cage(settings: dict[str, Any]) -> tuple[Cage, dict[str, bool | str]]:
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    names, user = namespaces.enter() if settings["namespaces"] else ("", None)
    abi = landlock.version() if settings["landlock"] else 0
    filtered = settings["seccomp"] and seccomp.available()
    cage = Cage(
        namespaced=bool(names),
        user=user,
        landlock=abi,
        seccomp=seccomp.pack(seccomp.build(kernel.machine())) if filtered else b"",
        readable=settings["readable"],
        address_space=own + (settings["memory_mb"] << 20),
        tmp_bytes=TMP_MB << 20,
    )
    layers: dict[str, bool | str] = {
        "seccomp": filtered,
        "landlock": f"ABI {abi}" if abi else False,
        "namespaces": names or False,
        "tmpfs": f"{TMP_MB} MiB" if names else False,
        "own user": user is not None or "user" in names,
        "rlimits": True,
        "no_new_privs": True,
    }
    return cage, layers


def _serve(host: socket.socket, alive: int, cage: Cage) -> None:
    gc.collect()
    gc.disable()
    gc.freeze()  # collections in programs then leave our pages shared
    while True:
        _wait_for(host.fileno(), alive)
        request, received, _, _ = socket.recv_fds(host, 4096, 8)
        if not request:
            return
        if cage.namespaced:
            namespaces.fresh_tmp(TMP_MB)
        server, child = os.getpid(), os.fork()
        if child == 0:
            program.live(received, cage, json.loads(request)["seconds"], server)
        for fd in received:
            os.close(fd)
        running = kernel.open_process(child)
        socket.send_fds(host, [b"started"], [running])
        _wait_for(running, alive, host.fileno())
        os.close(running)
        with suppress(ProcessLookupError):  # all that is in this PID namespace but ourselves
            os.kill(-1, signal.SIGKILL) if cage.namespaced else os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if cage.namespaced:
            namespaces.drop_tmp()
        host.send(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode())


def _wait_for(awaited: int, alive: int, host: int | None = None) -> None:
    """Until there is something on `awaited`; the end if the host went away meanwhile."""
    poll = select.poll()
    poll.register(awaited, select.POLLIN)
    poll.register(alive, select.POLLIN)
    if host is not None:
        poll.register(host, select.POLLHUP)
    while True:
        ready = dict(poll.poll())
        if alive in ready or (host is not None and host in ready):
            os._exit(1)
        if awaited in ready:
            return
