"""The web server of the annotation page: static files, a JSON API, and access control.

Names of runs never leave the server. The page loads nothing from other sites, and its content
security policy forbids it; responses are sent as JSON and shown as text.
"""

from __future__ import annotations

import secrets
import socket
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException

from marlhf.judge.annotate.store import (
    LONGEST_NOTE,
    AnnotatorProgress,
    NoPair,
    Remarks,
    Store,
    VoteError,
)
from marlhf.judge.annotate.tasks import LOCAL
from marlhf.judge.pairs import JudgeError
from marlhf.runs.evaluations import split_turns

HERE = Path(__file__).parent
LONGEST_BODY = 4096
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Action(BaseModel):
    """Fields of every change: the annotator, and an id so that a repeated request counts once."""

    model_config = ConfigDict(extra="forbid", strict=True)
    annotator: str = Field(max_length=200)
    action: str = Field(pattern=r"^[0-9a-zA-Z-]{8,64}$")


class Vote(Action):
    pair: str = Field(max_length=64)
    vote: Literal["left", "tie", "right", "skip"]
    strength: Literal[1, 2, 3] | None = None
    flag: bool = False
    note: str = Field(default="", max_length=LONGEST_NOTE)


def make_app(store: Store, token: str | None = None) -> FastAPI:
    """The page for these votes; with a token, only for those who have the address with it."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def guard(request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        response = _refusal(request, token) or await handle(request)
        response.headers.update(HEADERS)
        return response

    for path, (name, kind) in FILES.items():
        send = partial(FileResponse, HERE / name, media_type=kind)
        app.add_route(path, lambda request, send=send: send())

    @app.get("/api/guide")
    def guide() -> dict[str, Any]:
        return asdict(store.guide)

    @app.get("/api/next")
    def next_pair(annotator: Annotated[str, Query(max_length=200)]) -> dict[str, Any]:
        return _shown(store, store.state(annotator))

    @app.post("/api/vote")
    def vote(sent: Annotated[Vote, _body(Vote)]) -> dict[str, Any]:
        remarks = Remarks(sent.strength, sent.flag, sent.note)
        return _shown(store, store.vote(sent.annotator, sent.pair, sent.vote, sent.action, remarks))

    @app.post("/api/undo")
    def undo(sent: Annotated[Action, _body(Action)]) -> dict[str, Any]:
        return _shown(store, store.undo(sent.annotator, sent.action))

    @app.exception_handler(VoteError)
    def wrong(request: Request, error: VoteError) -> Response:
        return _error(404 if isinstance(error, NoPair) else 400, str(error))

    @app.exception_handler(sqlite3.Error)
    def unwritten(request: Request, error: sqlite3.Error) -> Response:
        return _error(503, f"The database is not available now: {error}. Nothing was stored.")

    @app.exception_handler(AnyHTTPException)
    def refused(request: Request, error: AnyHTTPException) -> Response:
        return _error(error.status_code, f"{error.detail}.".replace("..", "."))

    @app.exception_handler(RequestValidationError)
    def unreadable(request: Request, error: RequestValidationError) -> Response:
        return _error(400, "There is no name. Enter your name.")

    return app


def serve(
    store: Store, host: str, port: int, token: str | None, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM; prints the address once the server is up."""
    listener = listen(host, port)
    config = uvicorn.Config(
        make_app(store, token),
        log_level="warning",
        access_log=False,  # it would contain the token
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=10,
    )
    server, where = uvicorn.Server(config), address(listener, token)
    # In a thread, so that it also works inside a running event loop, as in a notebook.
    ended = threading.Event()

    def run() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    say(f"Open {where} in a browser. Ctrl-C ends it.")
    try:
        # Not `thread.join`: interrupted, it takes a running thread for a stopped one (bpo-45274).
        ended.wait()
    except KeyboardInterrupt:
        server.should_exit = True
        ended.wait()
    finally:
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait until the server is up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=64, dualstack_ipv6=both)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0].lower()
        raise JudgeError(
            f"Cannot listen at {host}, port {port}: {reason}. Give another --port (0 takes a free "
            "one) or --host."
        ) from error


def address(listener: socket.socket, token: str | None) -> str:
    """The URL of the page; if it listens on all interfaces, of the one others most likely use."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = _own_address()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def _own_address() -> str:
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect(("10.255.255.255", 1))  # sends nothing: it only selects an interface
        return probe.getsockname()[0]
    except OSError:
        return socket.gethostname()
    finally:
        probe.close()


def _refusal(request: Request, token: str | None) -> Response | None:
    """An error for requests from other sites or without the token, else None."""
    host = request.headers.get("host", "")
    if token is None and _split(f"//{host}").hostname not in LOCAL:
        # DNS rebinding: another site's name that resolves to this machine could read and vote.
        return _error(403, "This page is for this machine only. Open it at 127.0.0.1.")
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site:
        foreign = site not in ("same-origin", "none")
    else:
        foreign = bool(origin) and _split(origin).netloc != host
    if foreign and request.method != "GET":
        return _error(403, "Votes are accepted from this page only, not from another site.")
    if token is None:
        return None
    cookie = f"marlhf_{(request.scope.get('server') or ('', 0))[1]}"
    given = request.query_params.get("token")
    if request.url.path == "/" and given is not None and _same(given, token):
        # Redirect to an address without the token, which is safe to show, share and bookmark.
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(cookie, token, max_age=30 * 86400, httponly=True, samesite="lax")
        return answer
    if not _same(request.cookies.get(cookie, ""), token):
        return _error(401, "Open the address with the token that the command printed.")
    return None


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _body(kind: type[Action]) -> Any:
    """A small JSON body. Forms of other sites cannot send this content type without a preflight."""

    async def read(request: Request) -> Action:
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise HTTPException(415, "Send JSON, as application/json")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > LONGEST_BODY:
                raise HTTPException(413, f"A vote has at most {LONGEST_BODY} bytes")
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the body"
            raise VoteError(f"Cannot read `{place}` of the request: {first['msg']}.") from None

    return Depends(read)


def _shown(store: Store, state: AnnotatorProgress) -> dict[str, Any]:
    """A state with the texts to compare. Which run is on which side stays here."""
    shown = asdict(state)
    if state.pair is not None:
        item = store.items[state.pair]
        left, right = store.sides(state.annotator, state.pair)
        prompt: Any = item.prompt
        turns = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
        shown["pair"] = {
            "id": state.pair,
            "prompt": turns,
            "reference": item.reference,
            "left": left,
            "right": right,
            "turns": {"left": split_turns(left), "right": split_turns(right)},
        }
    return shown


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)
