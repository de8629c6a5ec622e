"""The user's application: found, looked at, and given one route more for the trial."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from disconnect_watch.doctor.finding import Finding, Status

__all__ = ["BARE", "Application", "ApplicationError", "load", "load_application"]

_AREA = "application"
#: Wrappers around an application that are followed; more would be a circle.
_MAX_WRAPPERS = 32


class ApplicationError(Exception):
    """It cannot be loaded; says why."""


@dataclass(frozen=True, slots=True)
class Application:
    """What was loaded.

    Attributes:
        name: as the user gave it.
        app: what a server would call.
        wrappers: the pure ASGI middlewares around the framework, outermost first.
        framework: the Starlette or FastAPI application within; None if there is none.
        middlewares: those of the framework, outermost first.
        num_base_http: how many of them are Starlette's ``BaseHTTPMiddleware``.
    """

    name: str
    app: Any
    wrappers: tuple[str, ...]
    framework: Any
    middlewares: tuple[str, ...]
    num_base_http: int

    def findings(self) -> list[Finding]:
        """What it is made of, and what that does to a disconnect."""
        if self.framework is None:
            kind = Finding(
                _AREA,
                "framework",
                Status.NOTE,
                f"{type(self.app).__name__}, neither Starlette nor FastAPI",
                "the trial shows the servers alone; what is inside the application is not tried",
            )
            return [kind, *self._stack()]
        kind = Finding(_AREA, "framework", Status.OK, type(self.framework).__name__)
        return [kind, *self._stack()]

    def _stack(self) -> list[Finding]:
        names = [*self.wrappers, *self.middlewares]
        found = [Finding(_AREA, "middlewares", Status.OK, " > ".join(names) or "none")]
        if self.num_base_http:
            found.append(
                Finding(
                    _AREA,
                    "BaseHTTPMiddleware",
                    Status.NOTE,
                    f"{self.num_base_http} in the stack: request.is_disconnected() never tells",
                    'read request.scope["state"]["disconnect_watch.token"], or make them pure ASGI',
                )
            )
        return found

    def __str__(self) -> str:
        return repr(self.name) if self.name else "an application of the doctor's own"

    @contextlib.contextmanager
    def with_route(self, path: str, handler: Any) -> Iterator[Any]:
        """The application, which answers ``path`` by an ASGI ``handler`` within its middlewares.

        Without a framework, the handler alone.
        """
        if self.framework is None:
            yield handler
            return
        from starlette.routing import Route

        route = Route(path, handler)
        self.framework.router.routes.insert(0, route)
        try:
            yield self.app
        finally:
            self.framework.router.routes.remove(route)


#: In place of an application, where the user gave none.
BARE = Application("", None, (), None, (), 0)


def load_application(name: str, *, is_factory: bool = False) -> Application:
    """Import an application as uvicorn would, from the working directory too.

    Args:
        name: ``module:attribute``.
        is_factory: call the attribute for the application.

    Raises:
        ApplicationError: it cannot be imported, or made.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    app = load(name)
    if is_factory:
        try:
            app = app()
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise ApplicationError(f"cannot make {name!r}: it raised {error!r}") from error
    if not callable(app):
        raise ApplicationError(f"cannot serve {name!r}: {type(app).__name__} is not callable")
    if not _takes_asgi(app):
        raise ApplicationError(
            f"cannot serve {name!r}: {type(app).__name__} does not take (scope, receive, send), "
            "so it is no ASGI application; one that returns such an application needs --factory, "
            "and a server of another kind an adapter of its own, see docs/adapters"
        )
    return _look_into(name, app)


def _takes_asgi(app: Any) -> bool:
    try:
        signature = inspect.signature(app)
    except (TypeError, ValueError):  # compiled code may have none
        return True
    if list(signature.parameters) == ["scope"]:  # ASGI 2, which uvicorn serves as well
        return True
    try:
        signature.bind(None, None, None)
    except TypeError:
        return False
    return True


def load(name: str) -> Any:
    """Import what ``module:attribute`` names.

    Raises:
        ApplicationError: there is none, or its module raised an error.
    """
    from uvicorn.importer import ImportFromStringError, import_from_string

    try:
        return import_from_string(name)
    except ImportFromStringError as error:
        raise ApplicationError(f"cannot load {name!r}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ApplicationError(f"cannot load {name!r}: it raised {error!r}") from error


def _look_into(name: str, app: Any) -> Application:
    # Where nothing has imported it, the application is not of it.
    starlette = sys.modules.get("starlette.applications")
    base = sys.modules.get("starlette.middleware.base")
    wrappers: list[str] = []
    inner, framework = app, None
    for _ in range(_MAX_WRAPPERS):
        if starlette is not None and isinstance(inner, starlette.Starlette):
            framework = inner
            break
        if not hasattr(inner, "app"):
            break
        wrappers.append(type(inner).__name__)
        inner = inner.app
    classes = [middleware.cls for middleware in getattr(framework, "user_middleware", ())]
    is_base_http = [
        base is not None and isinstance(cls, type) and issubclass(cls, base.BaseHTTPMiddleware)
        for cls in classes
    ]
    return Application(
        name=name,
        app=app,
        wrappers=tuple(wrappers),
        framework=framework,
        middlewares=tuple(getattr(cls, "__name__", repr(cls)) for cls in classes),
        num_base_http=sum(is_base_http),
    )
