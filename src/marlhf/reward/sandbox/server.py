"""The fork server: a small Python process in the sandbox that forks once per program.

It never reads a program, its input or its output, only passes their descriptors on: so nothing of
one program is in memory when the next one is forked. It stops, with its program, when the host
closes its socket or dies.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import sys
from contextlib import suppress
from typing import Any

from marlhf.reward.sandbox import kernel, namespaces, program, seccomp
from marlhf.reward.sandbox.program import THREADS, Confinement

TMP_MB = 64


def main(settings: dict[str, Any]) -> None:
    # A low number, so that those which programs get are low as well, whatever the host has open.
    host = socket.socket(fileno=fcntl.fcntl(settings["socket"], fcntl.F_DUPFD_CLOEXEC, 3))
    os.close(settings["socket"])
    try:
        host_process = kernel.open_process(settings["host"])
        if os.getppid() != settings["host"]:
            return
        _preload(settings)
        confinement, layers = _build_confinement(settings)
    except Exception as error:
        host.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    if confinement.namespaced:
        # Process 1 of the PID namespace: when it ends, the kernel ends all others.
        inner = os.fork()
        if inner:
            host.close()
            os.close(host_process)
            os.waitpid(inner, 0)
            return
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if confinement.namespaced:
            namespaces.build_root(settings["readable"])
    except Exception as error:
        host.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    host.send(json.dumps({"layers": layers}).encode())
    _serve(host, host_process, confinement)


def _preload(settings: dict[str, Any]) -> None:
    sys.path[:] = [path for path in sys.path if os.path.isdir(path)]
    sys.path += [path for path in settings["packages"] if path not in sys.path]
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills programs first, not the training
    for name in settings["preload"]:
        with suppress(ImportError):
            importlib.import_module(name)
    # What `site` adds to Python, which runs without it here: exit, quit, help and the like.
    site.setquit()
    site.setcopyright()
    site.sethelper()
    os.environ.clear()
    sys.path_importer_cache.clear()


def _build_confinement(settings: dict[str, Any]) -> tuple[Confinement, dict[str, bool | str]]:
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    names, user = namespaces.enter() if settings["namespaces"] else ("", None)
    abi = namespaces.landlock_version() if settings["landlock"] else 0
    filtered = settings["seccomp"] and seccomp.available()
    own_user = user is not None or "user" in names
    asks = not own_user and filtered and seccomp.can_ask()
    confinement = Confinement(
        namespaced=bool(names),
        own_user=own_user,
        user=user,
        landlock=abi,
        seccomp=seccomp.pack(seccomp.build(kernel.machine())) if filtered else b"",
        asks_for_threads=asks,
        readable=settings["readable"],
        address_space=own + (settings["memory_mb"] << 20),
        tmp_bytes=TMP_MB << 20,
    )
    layers: dict[str, bool | str] = {
        "seccomp": filtered,
        "landlock": f"ABI {abi}" if abi else False,
        "namespaces": names or False,
        "tmpfs": f"{TMP_MB} MiB" if names else False,
        "own user": own_user,
        "threads": f"at most {THREADS}" if own_user or asks else False,
        "rlimits": True,
        "no_new_privs": True,
    }
    return confinement, layers


def _serve(host: socket.socket, host_process: int, confinement: Confinement) -> None:
    gc.collect()
    gc.disable()
    gc.freeze()  # garbage collection in programs does not touch, and so copy, our pages
    while True:
        _wait_for(host.fileno(), host_process)
        request, received, _, _ = socket.recv_fds(host, 4096, 8)
        if not request:
            return
        if confinement.namespaced:
            namespaces.fresh_tmp(TMP_MB)
        control, theirs = socket.socketpair() if confinement.asks_for_threads else (None, None)
        server, child = os.getpid(), os.fork()
        if child == 0:
            received += [theirs.fileno()] if theirs else []
            program.run_program(received, confinement, json.loads(request)["seconds"], server)
        for fd in received:
            os.close(fd)
        if theirs:
            theirs.close()
        running = kernel.open_process(child)
        socket.send_fds(host, [b"started"], [running])
        _follow(running, child, control, host_process, host.fileno())
        os.close(running)
        with suppress(ProcessLookupError):
            if confinement.namespaced:
                os.kill(-1, signal.SIGKILL)  # every process of this PID namespace but this one
            else:
                os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if confinement.namespaced:
            namespaces.drop_tmp()
        host.send(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode())


def _follow(
    running: int, child: int, control: socket.socket | None, host_process: int, host: int
) -> None:
    """Wait until a program ends; decide meanwhile whether it may start another thread.

    Without a user of its own a program shares RLIMIT_NPROC with the host's processes, and root has
    no such limit at all. So its process asks here, by a seccomp listener that it sends first.
    """
    poll = _poll_host(running, host_process, host)
    listener = None
    if control:
        poll.register(control, select.POLLIN)
    while running not in (ready := _ready(poll, host_process, host)):
        if control and control.fileno() in ready:
            _, received, _, _ = socket.recv_fds(control, 64, 1)
            poll.unregister(control)
            if received:
                [listener] = received
                poll.register(listener, select.POLLIN)
        elif listener in ready:
            seccomp.answer(listener, allow=_num_threads(child) < THREADS)
    if control:
        control.close()
    if listener is not None:
        os.close(listener)


def _num_threads(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
    return 0  # it has ended


def _wait_for(awaited: int, host_process: int) -> None:
    poll = _poll_host(awaited, host_process)
    while awaited not in _ready(poll, host_process):
        pass


def _poll_host(awaited: int, host_process: int, host: int | None = None) -> select.poll:
    poll = select.poll()
    poll.register(awaited, select.POLLIN)
    poll.register(host_process, select.POLLIN)
    if host is not None:
        poll.register(host, select.POLLHUP)
    return poll


def _ready(poll: select.poll, host_process: int, host: int | None = None) -> dict[int, int]:
    """The descriptors that are ready; exits if the host process has ended or hung up."""
    ready = dict(poll.poll())
    if host_process in ready or (host is not None and host in ready):
        os._exit(1)
    return ready
